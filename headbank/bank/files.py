"""Banks on disk: write, read, find."""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors import torch as safetensors

from headbank.bank.compare import calibrate_command, check_info
from headbank.bank.schema import READ_VERSIONS, SCHEMA_VERSION, Bank, Manifest, validate
from headbank.errors import BankError
from headbank.types import ModelInfo

MANIFEST = "manifest.json"
MAPS = "maps.safetensors"


def slug(model_id: str) -> str:
    """Folder name of a model: the last part of its id, lower-cased, only `a-z 0-9 . _ -`, at most 100 long.

    Models that differ in nothing but their owner share a folder of one root.
    """
    parts = [part for part in re.split(r"[/\\]", model_id) if part]
    name = re.sub(r"[^a-z0-9._-]+", "-", parts[-1].lower() if parts else "")[:100].strip(".-")
    return name or "model"


def shipped_root() -> Path:
    """Folder of the banks that ship inside the package."""
    return Path(__file__).parent.parent / "banks"


def write(bank: Bank, root: Path) -> Path:
    """Write `root/<slug>` and return it; a bank already there is replaced as a whole.

    Files are completed and synced in a temporary folder that is then renamed, so any failure leaves the old
    bank or the new one. Killed between the two renames of a replacement, the old bank lies in `.<slug>.old`,
    where `find` and `locate` see it and the next write puts it back. Raises BankError for an invalid bank and
    for a failing disk.
    """
    validate(bank)
    # A copy of each map: safetensors refuses strided tensors and tensors that share memory.
    copies = {
        name: values.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, values in sorted(bank.maps.items())
    }
    maps = safetensors.save(copies)
    manifest = _manifest_bytes(bank, {MAPS: maps})
    name = slug(bank.info.model_id)
    place, parked = root / name, root / f".{name}.old"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if parked.exists() and not place.exists():
            os.rename(parked, place)
        shutil.rmtree(parked, ignore_errors=True)
        temp = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=root))
        try:
            # mkdtemp makes a private folder; the bank itself gets the permissions that the umask grants.
            fresh = temp / name
            fresh.mkdir()
            _write_synced(fresh / MAPS, maps)
            _write_synced(fresh / MANIFEST, manifest)
            _sync_folder(fresh)
            _swap(fresh, place, parked)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        _sync_folder(root)
    except OSError as error:
        raise BankError(f"{place}: the bank could not be written: {error.strerror or error}") from error
    shutil.rmtree(parked, ignore_errors=True)
    return place


def read(folder: Path) -> Bank:
    """Read and check a bank.

    Raises BankError that names the missing or damaged file and what is wrong with it.
    """
    manifest = _read_manifest(folder)
    record = manifest.files.get(MAPS)
    if record is None:
        raise BankError(f"{folder / MANIFEST}: files has no entry for {MAPS}")
    path = folder / MAPS
    raw = _read_bytes(path)
    if len(raw) != record.bytes:
        raise BankError(f"{path}: the file has {len(raw)} bytes, the manifest says {record.bytes}")
    if _sha256(raw) != record.sha256:
        raise BankError(f"{path}: its SHA-256 differs from the one in the manifest")
    try:
        maps = safetensors.load(raw)
    except SafetensorError as error:
        raise BankError(f"{path}: not a safetensors file: {error}") from error
    bank = Bank(
        manifest.model,
        manifest.head_sets,
        manifest.fusions,
        manifest.defaults,
        maps,
        dict(manifest.training),
    )
    try:
        validate(bank)
    except BankError as error:
        raise BankError(f"{folder}: {error}") from error
    return bank


def locate(folder: Path) -> Path:
    """The bank that a user's path means: the folder itself, or the only bank in it.

    Raises BankError when there is none or more than one.
    """
    if (folder / MANIFEST).is_file():
        return folder
    found = _banks_in(folder)
    if not found:
        raise BankError(f"{folder}: no head bank here ({MANIFEST} is missing)")
    if len(found) > 1:
        raise BankError(f"{folder}: more than one head bank here, name one of {_names(found)}")
    return found[0]


def find(root: Path, info: ModelInfo) -> Path:
    """Folder of a model's bank: `root` itself, else `root/<slug>`, else the only bank of `root` that fits.

    The first two are returned unchecked, so that `check` can say what differs. Raises BankError with the
    command that makes a bank when there is none.
    """
    for folder in (root, root / slug(info.model_id)):
        if (folder / MANIFEST).is_file():
            return folder
    fitting, other = [], []
    for folder in _banks_in(root):
        try:
            check_info(_read_manifest(folder).model, info)
        except BankError:
            other.append(folder)
        else:
            fitting.append(folder)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise BankError(f"{root}: more than one head bank fits the model, name one of {_names(fitting)}")
    seen = f" (of other models, older or damaged: {_names(other)})" if other else ""
    raise BankError(
        f"{root}: no head bank for this model{seen}; make one with: {calibrate_command(info.model_id, root)}"
    )


def _banks_in(root: Path) -> list[Path]:
    """Folders of `root` that hold a manifest, by name; a parked bank only where nothing took its place."""
    folders = sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
    replaced = {f".{folder.name}.old" for folder in folders}
    return [folder for folder in folders if folder.name not in replaced]


def _names(folders: list[Path]) -> str:
    return ", ".join(folder.name for folder in folders)


def _manifest_bytes(bank: Bank, files: Mapping[str, bytes]) -> bytes:
    draft = {
        "schema_version": SCHEMA_VERSION,
        "model": asdict(bank.info),
        "head_sets": {name: asdict(heads) for name, heads in bank.head_sets.items()},
        "fusions": {name: asdict(fusion) for name, fusion in bank.fusions.items()},
        "defaults": bank.defaults,
        "training": bank.training,
        "files": {name: {"bytes": len(raw), "sha256": _sha256(raw)} for name, raw in files.items()},
        "sha256": "",
    }
    try:
        manifest = Manifest.model_validate_json(_dump(draft), strict=True, extra="forbid")
    except ValidationError as error:
        raise BankError(f"the bank does not fit the manifest's schema: {_first_problem(error)}") from error
    # Written as it was understood, with 1.0 for a 1 among floats: a bank that was read is the same bytes again.
    content = manifest.model_dump(mode="json", exclude={"sha256"})
    return _dump(content | {"sha256": _sha256(_dump(content))})


def _read_manifest(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise BankError(f"{folder}: no such folder")
    path = folder / MANIFEST
    raw = _read_bytes(path)
    try:
        content = json.loads(raw, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise BankError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BankError(f"{path}: not a JSON object")
    _check_version(content.get("schema_version"), folder)
    try:
        manifest = Manifest.model_validate_json(raw, strict=True, extra="forbid")
    except ValidationError as error:
        raise BankError(f"{path}: {_first_problem(error)}") from error
    del content["sha256"]
    if _sha256(_dump(content)) != manifest.sha256:
        raise BankError(f"{path}: the file was edited, its SHA-256 differs from the one it records")
    return manifest


def _check_version(version: object, folder: Path) -> None:
    if version in READ_VERSIONS:
        return
    readable = ", ".join(map(str, READ_VERSIONS))
    message = f"{folder / MANIFEST}: schema_version is {version!r}, this program reads {readable}"
    if isinstance(version, int) and version < min(READ_VERSIONS):
        command = calibrate_command("MODEL", folder.parent)
        message += f"; the bank is too old: delete its folder and recalibrate with: {command}"
    raise BankError(message)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _dump(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BankError(f"{path}: the file is missing") from error
    except OSError as error:
        raise BankError(f"{path}: the file cannot be read: {error.strerror}") from error


def _write_synced(path: Path, raw: bytes) -> None:
    with path.open("xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap(fresh: Path, place: Path, parked: Path) -> None:
    """Rename `fresh` to `place`; what was there goes to `parked`, and comes back when the rename fails."""
    if not place.exists():
        os.rename(fresh, place)
        return
    os.rename(place, parked)
    try:
        os.rename(fresh, place)
    except BaseException:
        os.rename(parked, place)
        raise
