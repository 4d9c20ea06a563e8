"""What a bank holds, how its manifest spells it, and when it is sound."""

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, JsonValue

from headbank.errors import BankError
from headbank.types import LAYOUTS, VIEWS, Fusion, HeadSet, Layout, ModelInfo, View

SCHEMA_VERSION = 2
READ_VERSIONS = (2,)

VOTERS = ("bm25", "dense")
"""Who may sit beside a head set in a fusion."""

_MAP_DTYPES = (torch.float64, torch.float32, torch.uint8)

_Named = TypeVar("_Named", HeadSet, Fusion)


@dataclass(frozen=True, eq=False)
class Bank:
    """Everything that the calibration learnt about one model."""

    info: ModelInfo
    head_sets: dict[str, HeadSet]
    """By the name of the set, `<detector>.<view>.<layout>`."""
    fusions: dict[str, Fusion]
    """By the name of the fusion, `fusion.<view>.<layout>`."""
    defaults: dict[View, str]
    """The head set that votes where the caller names only a view; its layout is the view's default layout."""
    maps: dict[str, torch.Tensor]
    """By `<detector>.<view>.<layout>.<quantity>`: for example `expert.query.joint.frequency` [P, L, H] (f),
    `.strength` [P, L, H] (Abar), `.soft` [P, L, H] (mean average precision), `.expert` and `.sensitive` [L, H]
    uint8."""
    training: dict[str, Any]
    """JSON values: data name and hash, sample ids, seed, placements, thresholds, options, counts of used and
    rejected samples by reason, library versions, selection protocol."""

    def head_set(self, view: View, *, layout: Layout | None = None, detector: str | None = None) -> HeadSet:
        """The head set that votes.

        `detector` None is the one of the view's default. `layout` None is that of the view's default; where the
        detector has no set in it, the only layout the detector has. Raises BankError that names the sets there
        are when none is meant, or more than one.
        """
        if detector is None:
            default = self._default(view)
            if default is None:
                raise BankError(
                    f"the bank has no default head set of the view {view}; {_has(self.head_sets)}"
                )
            detector = default.detector
        return self._pick(self.head_sets, detector, view, layout)

    def fusion(self, view: View, layout: Layout | None = None) -> Fusion:
        """The fusion of a view; `layout` None as for `head_set`. Raises BankError that names those there are."""
        return self._pick(self.fusions, "fusion", view, layout)

    def _default(self, view: View) -> HeadSet | None:
        return self.head_sets.get(self.defaults.get(view, ""))

    def _pick(self, table: dict[str, _Named], first: str, view: View, layout: Layout | None) -> _Named:
        default = self._default(view)
        if (
            layout is None
            and default is not None
            and (name := _name(first, view, default.style.layout)) in table
        ):
            return table[name]
        wanted = [_name(first, view, each) for each in ((layout,) if layout else LAYOUTS)]
        found = [name for name in wanted if name in table]
        if len(found) == 1:
            return table[found[0]]
        if found:
            raise BankError(
                f"the bank has no default of the view {view}; name a layout of {' and '.join(found)}"
            )
        raise BankError(f"the bank has no {' or '.join(wanted)}; {_has(table)}")


class FileRecord(BaseModel):
    """Size and hash of one file of a bank."""

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """Schema version 2 of `manifest.json`."""

    schema_version: Literal[2]
    model: ModelInfo
    head_sets: dict[str, HeadSet]
    fusions: dict[str, Fusion]
    defaults: dict[View, str]
    training: dict[str, JsonValue]
    files: dict[str, FileRecord]
    sha256: str
    """SHA-256 of the manifest without this field."""


def validate(bank: Bank) -> None:
    """Check that a bank is sound in itself.

    Names say what they name; heads lie inside [L, H] without duplicates; what was fitted per head or per voter
    has one finite value for each; fusions and defaults refer to head sets there are; maps are finite and shaped
    [L, H] or [P, L, H] with one P per detector, view and layout; all records are finite JSON. Raises BankError
    that names the set and the field.
    """
    if not bank.head_sets:
        raise BankError("head_sets: a bank needs at least one head set")
    shape = (bank.info.n_layers, bank.info.n_heads)
    for name, heads in bank.head_sets.items():
        _validate_set(name, heads, shape)
    for name, fusion in bank.fusions.items():
        _validate_fusion(name, fusion, bank.head_sets)
    for view, name in bank.defaults.items():
        if name not in bank.head_sets:
            raise BankError(f"defaults.{view}: there is no head set {name}; {_has(bank.head_sets)}")
        if bank.head_sets[name].view != view:
            raise BankError(f"defaults.{view}: the head set {name} is of another view")
    _require_json(bank.training, "training")
    _validate_maps(bank.maps, shape)


def _validate_set(name: str, heads: HeadSet, shape: tuple[int, int]) -> None:
    where = f"head set {name}"
    if heads.name != name:
        raise BankError(f"{where}: its own name differs from its key")
    if name != _name(heads.detector, heads.view, heads.style.layout) or "." in heads.detector:
        raise BankError(f"{where}: its name is not <detector>.<view>.<layout> of what it holds")
    if not heads.heads:
        raise BankError(f"{where}: it has no heads")
    for head in heads.heads:
        if not (0 <= head.layer < shape[0] and 0 <= head.head < shape[1]):
            raise BankError(f"{where}: {head} is outside {shape[0]} layers x {shape[1]} heads")
    if len(set(heads.heads)) != len(heads.heads):
        raise BankError(f"{where}: a head is named twice")
    strict, total = heads.strict_experts, len(heads.heads)
    if not 0 <= strict <= total:
        raise BankError(f"{where}: strict_experts is {strict}, the set has {total} heads")
    if heads.response_tokens is not None and heads.response_tokens < 1:
        raise BankError(f"{where}: response_tokens is {heads.response_tokens}, at least 1 is needed")
    _validate_evidence(where, heads)
    _require_json(heads.dev_metrics, f"{where}: dev_metrics")


def _validate_evidence(where: str, heads: HeadSet) -> None:
    """What `evidence` needs of a set is there as a whole or not at all."""
    for field in ("z_mean", "z_std", "weights"):
        values = getattr(heads, field)
        if len(values) not in (0, len(heads.heads)):
            raise BankError(
                f"{where}: {field} has {len(values)} values, the set has {len(heads.heads)} heads"
            )
        _require_finite(values, f"{where}: {field}")
    if bool(heads.z_mean) != bool(heads.z_std):
        raise BankError(f"{where}: z_mean and z_std go together")
    _require_positive(heads.z_std, f"{where}: z_std")
    if heads.weights and not heads.z_mean:
        raise BankError(f"{where}: weights are of standardised log-odds, z_mean is missing")
    if heads.default_aggregation == "evidence" and not heads.z_mean:
        raise BankError(f"{where}: its default_aggregation is evidence, z_mean is missing")
    if not 0 <= heads.exponent < math.inf:
        raise BankError(f"{where}: exponent is {heads.exponent}, it must be finite and not negative")
    if heads.platt is not None:
        _validate_platt(where, heads.platt)


def _validate_fusion(name: str, fusion: Fusion, head_sets: dict[str, HeadSet]) -> None:
    where = f"fusion {name}"
    if fusion.name != name:
        raise BankError(f"{where}: its own name differs from its key")
    heads = head_sets.get(fusion.head_set)
    if heads is None:
        raise BankError(f"{where}: head_set names {fusion.head_set}; {_has(head_sets)}")
    if name != _name("fusion", heads.view, heads.style.layout):
        raise BankError(f"{where}: its name is not fusion.<view>.<layout> of its head_set {fusion.head_set}")
    if not heads.z_mean:
        raise BankError(f"{where}: its head_set {fusion.head_set} has no z_mean")
    if len(set(fusion.voters)) != len(fusion.voters) or not set(fusion.voters) <= set(VOTERS):
        raise BankError(f"{where}: voters must be distinct and of {', '.join(VOTERS)}")
    if bool(fusion.dense_model) != ("dense" in fusion.voters):
        raise BankError(f"{where}: dense_model names a model where dense is a voter, and only there")
    count = 1 + len(fusion.voters)
    for field in ("mean", "std", "weights"):
        values = getattr(fusion, field)
        if len(values) != count:
            raise BankError(f"{where}: {field} has {len(values)} values, there are {count} features")
        _require_finite(values, f"{where}: {field}")
    _require_positive(fusion.std, f"{where}: std")
    _validate_platt(where, fusion.platt)
    _require_json(fusion.dev_metrics, f"{where}: dev_metrics")


def _validate_platt(where: str, platt: tuple[float, float]) -> None:
    _require_finite(platt, f"{where}: platt")
    if platt[0] < 0:
        raise BankError(f"{where}: platt has a negative slope, it would turn the order round")


def _validate_maps(maps: dict[str, torch.Tensor], shape: tuple[int, int]) -> None:
    placements: dict[str, int] = {}
    for name, values in sorted(maps.items()):
        parts = name.split(".")
        if len(parts) != 4 or parts[1] not in VIEWS or parts[2] not in LAYOUTS:
            raise BankError(f"map {name}: its name is not <detector>.<view>.<layout>.<quantity>")
        if values.dtype not in _MAP_DTYPES:
            raise BankError(f"map {name}: dtype {values.dtype} is not float64, float32 or uint8")
        if values.dim() not in (2, 3) or tuple(values.shape[-2:]) != shape:
            raise BankError(f"map {name}: shape {list(values.shape)} does not end in [L, H] = {list(shape)}")
        owner = ".".join(parts[:3])
        if values.dim() == 3 and placements.setdefault(owner, len(values)) != len(values):
            raise BankError(f"map {name}: {len(values)} placements, unlike other maps of {owner}")
        if not bool(torch.isfinite(values).all()):
            raise BankError(f"map {name}: a value is not a finite number")


def _require_finite(values: tuple[float, ...], where: str) -> None:
    if not all(map(math.isfinite, values)):
        raise BankError(f"{where}: a value is not a finite number")


def _require_positive(values: tuple[float, ...], where: str) -> None:
    if not all(value > 0 for value in values):
        raise BankError(f"{where}: a deviation is not positive")


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


def _name(first: str, view: View, layout: Layout) -> str:
    return f"{first}.{view}.{layout}"


def _has(table: dict[str, HeadSet] | dict[str, Fusion]) -> str:
    return f"it has: {', '.join(sorted(table)) or 'none'}"
