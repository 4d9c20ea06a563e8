"""The head bank on disk: which heads of one model vote, and how they were found.

A bank is the folder `ROOT/<model-slug>/`:

* `manifest.json`: the model's fingerprint, the head sets, the record of the calibration, and the size and
  SHA-256 of every other file; its own SHA-256 is taken over all its other fields.
* `maps.safetensors`: score maps named `<detector>.<view>.<quantity>`, shaped [L, H] or [P, L, H].

No time stamps: equal banks are equal bytes.
"""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from pydantic import BaseModel, JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors import torch as safetensors

from headbank.errors import BankError, BankMismatch
from headbank.types import HeadSet, ModelInfo

SCHEMA_VERSION = 1
READ_VERSIONS = (1,)
MANIFEST = "manifest.json"
MAPS = "maps.safetensors"

FINGERPRINT_FIELDS = (
    "config_hash",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "d_model",
    "tokenizer_hash",
    "template_hash",
    "norm_hashes",
)
"""Fields of ModelInfo that must agree between a bank and the model it serves, in the order of the check."""

_MAP_DTYPES = (torch.float64, torch.float32, torch.uint8)


@dataclass(frozen=True, eq=False)
class Bank:
    """Everything that one calibration learnt about one model."""

    info: ModelInfo
    layout: Literal["joint"]
    head_sets: dict[str, HeadSet]
    """By the name of the set."""
    maps: dict[str, torch.Tensor]
    """For example `expert.query.frequency` [P, L, H] (f), `.strength` [P, L, H] (Abar), `.soft` [P, L, H]
    (mean average precision), `.expert` and `.sensitive` [L, H] uint8."""
    training: dict[str, Any]
    """JSON values: data name and hash, sample ids, seed, placements, thresholds, options, counts of used and
    rejected samples by reason, library versions, selection protocol."""


class FileRecord(BaseModel):
    """Size and hash of one file of a bank."""

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """Schema version 1 of `manifest.json`."""

    schema_version: Literal[1]
    model: ModelInfo
    layout: Literal["joint"]
    head_sets: dict[str, HeadSet]
    training: dict[str, JsonValue]
    files: dict[str, FileRecord]
    sha256: str
    """SHA-256 of the manifest without this field."""


def slug(model_id: str) -> str:
    """Folder name of a model: the last part of its id, lower-cased, only `a-z 0-9 . _ -`, at most 100 long.

    Models that differ in nothing but their owner share a folder of one root.
    """
    parts = [part for part in re.split(r"[/\\]", model_id) if part]
    name = re.sub(r"[^a-z0-9._-]+", "-", parts[-1].lower() if parts else "")[:100].strip(".-")
    return name or "model"


def shipped_root() -> Path:
    """Folder of the banks that ship inside the package."""
    return Path(__file__).parent / "banks"


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
    bank = Bank(manifest.model, manifest.layout, manifest.head_sets, maps, dict(manifest.training))
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
            _check_info(_read_manifest(folder).model, info)
        except BankError:
            other.append(folder)
        else:
            fitting.append(folder)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise BankError(f"{root}: more than one head bank fits the model, name one of {_names(fitting)}")
    seen = f" (of other models or damaged: {_names(other)})" if other else ""
    raise BankError(f"{root}: no head bank for this model{seen}; make one with: {_command(info, root)}")


def check(bank: Bank, info: ModelInfo) -> None:
    """Refuse a bank that was made with another model, tokenizer or template.

    `info.norm_hashes` may cover only the first layers (a truncated model): the common prefix is compared. The
    model's name, its revision and its dtype may differ. Raises BankMismatch for the first differing field.
    """
    _check_info(bank.info, info)


def validate(bank: Bank) -> None:
    """Check that a bank is sound in itself.

    Heads lie inside [L, H] without duplicates, `strict_experts` counts some of them, maps are finite and
    shaped [L, H] or [P, L, H] with one P per detector, and all records are finite JSON. Raises BankError.
    """
    shape = (bank.info.n_layers, bank.info.n_heads)
    for name, heads in bank.head_sets.items():
        _validate_set(name, heads, shape)
    _require_json(bank.training, "training")
    placements: dict[str, int] = {}
    for name, values in sorted(bank.maps.items()):
        if values.dtype not in _MAP_DTYPES:
            raise BankError(f"map {name}: dtype {values.dtype} is not float64, float32 or uint8")
        if values.dim() not in (2, 3) or tuple(values.shape[-2:]) != shape:
            raise BankError(f"map {name}: shape {list(values.shape)} does not end in [L, H] = {list(shape)}")
        if values.dim() == 3 and placements.setdefault(name.split(".")[0], len(values)) != len(values):
            raise BankError(f"map {name}: {len(values)} placements, unlike other maps of its detector")
        if not bool(torch.isfinite(values).all()):
            raise BankError(f"map {name}: a value is not a finite number")


def _validate_set(name: str, heads: HeadSet, shape: tuple[int, int]) -> None:
    if heads.name != name:
        raise BankError(f"head set {name}: its own name differs from its key")
    if not heads.heads:
        raise BankError(f"head set {name}: it has no heads")
    for head in heads.heads:
        if not (0 <= head.layer < shape[0] and 0 <= head.head < shape[1]):
            raise BankError(f"head set {name}: {head} is outside {shape[0]} layers x {shape[1]} heads")
    if len(set(heads.heads)) != len(heads.heads):
        raise BankError(f"head set {name}: a head is named twice")
    strict, total = heads.strict_experts, len(heads.heads)
    if not 0 <= strict <= total:
        raise BankError(f"head set {name}: strict_experts is {strict}, the set has {total} heads")
    _require_json(heads.dev_metrics, f"head set {name}: dev_metrics")


def _require_json(value: object, where: str) -> None:
    """Raise BankError naming the place of the first value that JSON would lose or change."""
    if isinstance(value, float) and not math.isfinite(value):
        raise BankError(f"{where} is not a finite number")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BankError(f"{where} has a key that is not a string")
            _require_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _require_json(item, f"{where}[{i}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise BankError(f"{where} is a {type(value).__name__}, not a JSON value")


def _check_info(expected: ModelInfo, found: ModelInfo) -> None:
    hint = f"recalibrate with: {_command(found, Path('BANK'))}"
    for field in FINGERPRINT_FIELDS:
        old, new = getattr(expected, field), getattr(found, field)
        if field == "norm_hashes":
            for layer, (a, b) in enumerate(zip(old, new, strict=False)):
                if a != b:
                    raise BankMismatch(field, a, b, f"layer {layer} is the first to differ; {hint}")
        elif old != new:
            raise BankMismatch(field, old, new, hint)


def _command(info: ModelInfo, root: Path) -> str:
    return f"headrank calibrate --model {info.model_id} --bank {root} --data FILE"


def _banks_in(root: Path) -> list[Path]:
    """Folders of `root` that hold a manifest, by name; a parked bank only where nothing took its place."""
    folders = sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
    replaced = {f".{folder.name}.old" for folder in folders}
    return [folder for folder in folders if folder.name not in replaced]


def _names(folders: list[Path]) -> str:
    return ", ".join(folder.name for folder in folders)


def _manifest_bytes(bank: Bank, files: Mapping[str, bytes]) -> bytes:
    content = {
        "schema_version": SCHEMA_VERSION,
        "model": asdict(bank.info),
        "layout": bank.layout,
        "head_sets": {name: asdict(heads) for name, heads in bank.head_sets.items()},
        "training": bank.training,
        "files": {name: {"bytes": len(raw), "sha256": _sha256(raw)} for name, raw in files.items()},
    }
    raw = _dump(content | {"sha256": _sha256(_dump(content))})
    try:
        Manifest.model_validate_json(raw, strict=True, extra="forbid")
    except ValidationError as error:
        raise BankError(f"the bank does not fit the manifest's schema: {_first_problem(error)}") from error
    return raw


def _read_manifest(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise BankError(f"{folder}: no such folder")
    path = folder / MANIFEST
    raw = _read_bytes(path)
    try:
        content = json.loads(raw, parse_constant=_refuse_constant)
    except ValueError as error:
        raise BankError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BankError(f"{path}: not a JSON object")
    version = content.get("schema_version")
    if version not in READ_VERSIONS:
        readable = ", ".join(map(str, READ_VERSIONS))
        raise BankError(f"{path}: schema_version is {version!r}, this program reads {readable}")
    try:
        manifest = Manifest.model_validate_json(raw, strict=True, extra="forbid")
    except ValidationError as error:
        raise BankError(f"{path}: {_first_problem(error)}") from error
    del content["sha256"]
    if _sha256(_dump(content)) != manifest.sha256:
        raise BankError(f"{path}: the file was edited, its SHA-256 differs from the one it records")
    return manifest


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


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
