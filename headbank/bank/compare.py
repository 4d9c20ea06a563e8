"""Whose bank it is, and how two banks differ."""

from dataclasses import dataclass, fields
from pathlib import Path

from headbank.bank.schema import Bank
from headbank.errors import BankMismatch
from headbank.types import Fusion, HeadSet, ModelInfo

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


@dataclass(frozen=True)
class Difference:
    """One thing in which two banks differ; None where a bank lacks it."""

    part: str
    """For example `model: n_layers`, `head set qr.query.joint`, `head set qr.query.joint: weights`."""
    left: object
    right: object
    jaccard: float | None = None
    """Common heads over all heads, where the heads differ."""


def check(bank: Bank, info: ModelInfo) -> None:
    """Refuse a bank that was made with another model, tokenizer or template.

    `info.norm_hashes` may cover only the first layers (a truncated model): the common prefix is compared. The
    model's name, its revision and its dtype may differ. Raises BankMismatch for the first differing field.
    """
    check_info(bank.info, info)


def check_info(expected: ModelInfo, found: ModelInfo) -> None:
    """`check` of the model that a bank records. Raises BankMismatch for the first differing field."""
    hint = f"recalibrate with: {calibrate_command(found.model_id, Path('BANK'))}"
    for field in FINGERPRINT_FIELDS:
        old, new = getattr(expected, field), getattr(found, field)
        if field == "norm_hashes":
            for layer, (a, b) in enumerate(zip(old, new, strict=False)):
                if a != b:
                    raise BankMismatch(field, a, b, f"layer {layer} is the first to differ; {hint}")
        elif old != new:
            raise BankMismatch(field, old, new, hint)


def calibrate_command(model: str, root: Path) -> str:
    """What a user types to make a bank."""
    return f"headrank calibrate --model {model} --bank {root} --data FILE"


def diff(left: Bank, right: Bank) -> list[Difference]:
    """All that makes two banks fit other models or rank otherwise: the fingerprint, defaults, head sets, fusions.

    Maps, metrics and training records say how a bank came about and are not compared.
    """
    found = [
        Difference(f"model: {field}", getattr(left.info, field), getattr(right.info, field))
        for field in FINGERPRINT_FIELDS
    ]
    for view in sorted({*left.defaults, *right.defaults}):
        found.append(Difference(f"default: {view}", left.defaults.get(view), right.defaults.get(view)))
    for name in sorted({*left.head_sets, *right.head_sets}):
        found += _members(f"head set {name}", left.head_sets.get(name), right.head_sets.get(name))
    for name in sorted({*left.fusions, *right.fusions}):
        found += _members(f"fusion {name}", left.fusions.get(name), right.fusions.get(name))
    return [difference for difference in found if difference.left != difference.right]


def _members(part: str, left: HeadSet | Fusion | None, right: HeadSet | Fusion | None) -> list[Difference]:
    """The two as a whole where one is missing, else field by field."""
    if left is None or right is None:
        one, other = (None if each is None else each.name for each in (left, right))
        return [Difference(part, one, other)]
    found = []
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if field.name == "heads":
            found.append(Difference(f"{part}: heads", a, b, len({*a} & {*b}) / len({*a} | {*b})))
        elif field.name != "dev_metrics":
            found.append(Difference(f"{part}: {field.name}", a, b))
    return found
