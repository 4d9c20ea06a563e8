"""Evidence: scores of documents that mean the same in every request, and their probability of relevance.

A head's attention on a document is `exp(q.k)` summed over the document's tokens, divided by the softmax
denominator over the whole prompt. The denominator grows with every other document, so masses of different
requests cannot be compared. Divided by the mass on reference tokens that every prompt has (its prefix and
tail), the denominator cancels, exactly for a single source row and nearly for a mean over several, whose
denominators differ: z hardly depends on which other documents came along.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from headbank.numerics.checks import check_scores
from headbank.numerics.voting import _check, _exact_sum

MASS_FLOOR = 1e-9
"""Attention below this counts as this: a head that does not see a document says little, not minus infinity."""

STD_FLOOR = 1e-6
"""A head whose z varies less than this over the samples is constant, and its deviation counts as 1."""


def log_odds(mass: Tensor, reference: Tensor, lengths: Tensor, exponent: float) -> Tensor:
    """`z = log(max(mass, floor) / max(length, 1)^exponent) - log(max(reference, floor))`.

    `mass` [..., n, D] is the attention on each document, `reference` [..., n] that on the reference tokens of
    the same prompt, `lengths` [D] tokens per document. An exponent of 0 leaves masses as they are, 1 makes them
    means. Returns [..., n, D] float64. Raises ValueError for shapes that do not fit, negative attention or a
    negative exponent, NonFiniteScore for NaN or infinity.
    """
    if mass.shape[:-1] != reference.shape or mass.shape[-1:] != lengths.shape:
        raise ValueError("mass must be [..., n, D], reference [..., n] and lengths [D]")
    if not exponent >= 0:
        raise ValueError(f"exponent must not be negative, got {exponent}")
    check_scores(mass, reference)
    if bool((mass < 0).any()) or bool((reference < 0).any()):
        raise ValueError("attention cannot be negative")
    evidence = mass.to(torch.float64).clamp(min=MASS_FLOOR).log()
    ballast = reference.to(torch.float64).clamp(min=MASS_FLOOR).log()
    return evidence - exponent * lengths.to(torch.float64).clamp(min=1).log() - ballast[..., None]


def moments(zs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of z per head, over all documents of all samples.

    `zs` has one [..., n, D_i] per sample. Returns two [..., n] float64; a deviation below `STD_FLOOR` is given
    as 1, so that a constant head's standardised z is 0. Raises ValueError without a document, NonFiniteScore
    for NaN or infinity.
    """
    if not any(z.shape[-1] for z in zs):
        raise ValueError("moments need at least one document")
    pooled = torch.cat([z.to(torch.float64) for z in zs], dim=-1)
    check_scores(pooled)
    std = pooled.std(-1, correction=0)
    return pooled.mean(-1), torch.where(std < STD_FLOOR, 1.0, std)


def standardise(z: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """`(z - mean) / std` per head: z [..., n, D], `mean` and `std` [..., n] -> [..., n, D] float64."""
    return (z.to(torch.float64) - mean[..., None]) / std[..., None]


def combine(z: Tensor, weights: Tensor | None = None) -> Tensor:
    """One score per document: the mean of z over heads, or `sum over heads of weight * z`.

    z [n, D], `weights` [n] or None -> [D] float64. Sums are exactly rounded, as votes are: the order of heads
    changes nothing. Raises ValueError without heads or for weights of another shape, NonFiniteScore for NaN or
    infinity.
    """
    _check(z)
    z = z.to(torch.float64)
    if weights is None:
        return _exact_sum(z) / z.shape[0]
    if weights.shape != z.shape[:1]:
        raise ValueError(f"weights must be [n] with n = {z.shape[0]}")
    check_scores(weights)
    return _exact_sum(weights.to(torch.float64)[:, None] * z)


def fit_platt(scores: Tensor, labels: Tensor) -> tuple[float, float]:
    """`a` and `b` of `P(relevant) = sigmoid(a score + b)` by maximum likelihood (Platt 1999), with a >= 0.

    `scores` [N], `labels` [N] bool. Platt's targets `(N+ + 1) / (N+ + 2)` and `1 / (N- + 2)` instead of 1 and 0
    keep the fit finite when the scores separate the labels. Scores that do not rise with relevance get a = 0:
    every document then has the base rate, and the order of documents is never turned round. Raises ValueError
    unless there are labels of both kinds, NonFiniteScore for NaN or infinity.
    """
    _check_labels(scores, labels)
    check_scores(scores)
    x = scores.to(torch.float64).numpy(force=True)
    y = labels.numpy(force=True)
    target = np.where(y, (y.sum() + 1) / (y.sum() + 2), 1 / ((~y).sum() + 2))
    # Fitted on standardised scores, so that the solver's tolerance does not depend on their unit.
    centre, scale = x.mean(), max(float(x.std()), STD_FLOOR)
    unit = (x - centre) / scale

    def loss(parameters: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, object]:
        logit = parameters[0] * unit + parameters[1]
        residual = 1 / (1 + np.exp(-logit)) - target
        value = np.mean(np.logaddexp(0, logit) - target * logit)
        return float(value), np.array([np.mean(residual * unit), np.mean(residual)])

    start = np.array([0.0, np.log(target.mean() / (1 - target.mean()))])
    options = {"ftol": 1e-15, "gtol": 1e-10}
    bounds = [(0, None), (None, None)]
    a, b = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    return float(a / scale), float(b - a * centre / scale)


def platt(scores: Tensor, a: float, b: float) -> Tensor:
    """`sigmoid(a score + b)`: any shape -> the same, float64 in [0, 1]. Raises NonFiniteScore for NaN or infinity."""
    check_scores(scores)
    return torch.sigmoid(a * scores.to(torch.float64) + b)


def expected_calibration_error(probability: Tensor, labels: Tensor, bins: int = 10) -> float:
    """`ECE = sum over bins of |B| / N * |share relevant in B - mean probability in B|` (Guo et al., ICML 2017).

    `probability` [N] in [0, 1], `labels` [N] bool; `bins` of equal width, each open below and closed above, the
    first with 0. Raises ValueError for N = 0, for values outside [0, 1] and for fewer than one bin.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    if (
        labels.dtype != torch.bool
        or labels.shape != probability.shape
        or labels.dim() != 1
        or not len(labels)
    ):
        raise ValueError("probability and labels must be [N], labels bool, N at least 1")
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError("probabilities must lie in [0, 1]")
    p = probability.to(torch.float64)
    inner_edges = torch.arange(1, bins, dtype=torch.float64, device=p.device) / bins
    gap = torch.zeros(bins, dtype=torch.float64, device=p.device)
    # |B| cancels: what is left of each bin is the sum of its differences.
    gap.index_add_(0, torch.bucketize(p, inner_edges), labels.to(torch.float64) - p)
    return float(gap.abs().sum() / len(p))


def flipped_pairs(whole: Tensor, parts: Sequence[tuple[Sequence[int], Tensor]]) -> float:
    """Share of document pairs that are ordered differently when the candidate set is scored in parts.

    `whole` [D] are the scores of one request with all documents. Each part is (indices into D, their scores in a
    request of their own); together the parts hold every document once, and their scores are pooled as they are.
    A pair is flipped when the sign of its score difference changes, so a tie that breaks, or a new tie, is a
    flip too. 0 for fewer than two documents. Raises ValueError when the parts are not a partition,
    NonFiniteScore for NaN or infinity.
    """
    documents = whole.shape[0]
    indices = [i for part, _ in parts for i in part]
    if sorted(indices) != list(range(documents)) or any(len(part) != len(s) for part, s in parts):
        raise ValueError(f"parts must hold each of the {documents} documents once, with one score each")
    if documents < 2:
        return 0.0
    pooled = torch.empty(documents, dtype=torch.float64, device=whole.device)
    pooled[indices] = torch.cat([scores.to(torch.float64) for _, scores in parts])
    whole = whole.to(torch.float64)
    check_scores(whole, pooled)
    first, second = torch.triu_indices(documents, documents, offset=1)
    changed = (whole[first] - whole[second]).sign() != (pooled[first] - pooled[second]).sign()
    return float(changed.to(torch.float64).mean())


def _check_labels(scores: Tensor, labels: Tensor) -> None:
    if labels.dtype != torch.bool or labels.shape != scores.shape or labels.dim() != 1:
        raise ValueError("scores and labels must be [N], labels bool")
    if not bool(labels.any()) or bool(labels.all()):
        raise ValueError("a probability scale needs relevant and irrelevant documents")
