"""In-Context Re-ranking (ICR, arXiv 2410.02642): every head's attention, less that for a content-free query."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headbank.numerics.checks import check_scores
from headbank.numerics.spans import _check_span
from headbank.types import Span

OUTLIER_SD = 2.0
"""Tokens further than this many standard deviations below their document's mean are dropped."""


def calibrated(token_mass: Tensor, null_mass: Tensor) -> Tensor:
    """Calibrated attention: what the query draws beyond what a content-free one ("N/A") draws anyway.

    Both [..., T], each averaged over the tokens of its own query -> [..., T] float64. Raises ValueError for
    different shapes, NonFiniteScore for NaN or infinity.
    """
    if token_mass.shape != null_mass.shape:
        raise ValueError("the query's and the content-free query's attention must have one shape")
    check_scores(token_mass, null_mass)
    return token_mass.to(torch.float64) - null_mass.to(torch.float64)


def icr_scores(token_mass: Tensor, null_mass: Tensor, spans: Sequence[Span]) -> Tensor:
    """Sum over heads and tokens of the calibrated attention, without each document's abnormal tokens.

    `token_mass` and `null_mass` are [n, T]. Token scores are summed over heads first; then each document drops
    its tokens below `mean - 2 sd` of its own token scores (sd with n - 1, as the authors compute it) and adds up
    the rest. A document of one token keeps it, an empty one scores 0. Returns [D] float64, which may be
    negative. Raises as `calibrated` does, and ValueError without heads or for a span that does not lie in [0, T].
    """
    if token_mass.shape[0] == 0:
        raise ValueError("ICR needs at least one head")
    scores = calibrated(token_mass, null_mass).sum(0)
    for span in spans:
        _check_span(span, scores.shape[0])
    totals = [_without_outliers(scores[start:end]).sum() for start, end in spans]
    return torch.stack(totals) if totals else scores.new_zeros(0)


def _without_outliers(scores: Tensor) -> Tensor:
    if len(scores) < 2:
        return scores
    return scores[scores >= scores.mean() - OUTLIER_SD * scores.std()]
