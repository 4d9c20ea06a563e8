"""Checks that several equations share."""

import torch
from torch import Tensor

from headbank.errors import NonFiniteScore


def check_scores(*tensors: Tensor) -> None:
    """Raises NonFiniteScore when any value is NaN or infinite: no ranking can be made of it."""
    if not all(bool(t.isfinite().all()) for t in tensors):
        raise NonFiniteScore("a head's attention or a score is not a finite number")


def check_labelled(values: Tensor, gold: Tensor) -> None:
    """Raises ValueError unless `values` [..., D] is finite and `gold` [D] bool has both kinds of documents."""
    if gold.dtype != torch.bool or gold.shape != values.shape[-1:]:
        raise ValueError(f"gold must be bool [D] with D = {values.shape[-1]}")
    if not bool(gold.any()) or bool(gold.all()):
        raise ValueError("a sample needs at least one gold and at least one distractor")
    if not bool(values.isfinite().all()):
        raise ValueError("attention and features must be finite")
