"""Panels: which voters sit together, and what each vote counts.

A sample is a matrix of features [F, D], one row per voter, and its golds [D]. D may differ between samples, the
rows may not. Rows are usually heads with their standardised z (`evidence.standardise`), but nothing here knows
about heads: a lexical or dense voter (BM25, cosine) is one more row, so `fit_weights` serves fusion as well.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor
from torch.nn.functional import softplus

from headbank.numerics.activation import average_precision
from headbank.numerics.checks import check_labelled
from headbank.types import HeadId

Loss = Literal["pointwise", "listwise"]

PRECISION_TOLERANCE = 1e-12
"""Mean average precisions closer than this are equal: rounding must not choose a head."""


def select_top(scores: Tensor, count: int, eligible: Tensor | None = None) -> tuple[HeadId, ...]:
    """The `count` best heads of a score map, best first: score descending, then (layer, head).

    `scores` is [L, H], `eligible` [L] bool (None: all layers). Fewer than `count` come back only when fewer are
    eligible. Raises ValueError for a count below 1, no eligible layer, and scores that are not finite.
    """
    _check_count(count)
    layers, heads = scores.shape
    allowed = [True] * layers if eligible is None else eligible.tolist()
    if len(allowed) != layers or not any(allowed):
        raise ValueError(f"eligible must be bool [L] with L = {layers} and at least one true layer")
    if not bool(scores.isfinite().all()):
        raise ValueError("head scores must be finite")
    values = scores.tolist()
    candidates = [HeadId(layer, h) for layer in range(layers) if allowed[layer] for h in range(heads)]
    return tuple(sorted(candidates, key=lambda h: (-values[h.layer][h.head], h))[:count])


def greedy_panel(features: Sequence[Tensor], gold: Sequence[Tensor], count: int) -> tuple[int, ...]:
    """Forward selection: rows whose mean vote ranks the golds best, in the order in which they were taken.

    Each round adds the row that gives the panel's mean the highest mean average precision over samples; the
    first of equal rows wins. Stops at `count` rows, or when no row improves the panel. `features` has one [F,
    D_i] per sample, `gold` one [D_i] bool. Returns row numbers, at least one. Raises ValueError for a count
    below 1, and as `fit_weights` does for samples.
    """
    _check_count(count)
    _check_samples(features, gold)
    panel: list[int] = []
    best = -math.inf
    # The mean's order is the sum's order, so sums are enough.
    sums = [torch.zeros(rows.shape[-1], dtype=torch.float64, device=rows.device) for rows in features]
    while len(panel) < min(count, len(features[0])):
        precision = _mean_precision([s + rows for s, rows in zip(sums, features, strict=True)], gold)
        precision[panel] = -math.inf
        highest = float(precision.max())
        if highest <= best + PRECISION_TOLERANCE:
            break
        chosen = int((precision >= highest - PRECISION_TOLERANCE).nonzero()[0])
        panel.append(chosen)
        best = highest
        sums = [s + rows[chosen] for s, rows in zip(sums, features, strict=True)]
    return tuple(panel)


def fit_weights(
    features: Sequence[Tensor],
    gold: Sequence[Tensor],
    *,
    strength: float,
    loss: Loss,
    nonnegative: bool = False,
) -> Tensor:
    """Weights that minimise `|w|^2 / 2 + strength * sum over samples of the sample's loss` [F] float64.

    Features are centred within each sample, since only the order within a sample matters; there is no
    intercept. With the centred scores `s = w . x`, a sample's loss is

    * `pointwise`: logistic loss, mean over golds of `log(1 + exp(-s))` and mean over distractors of
      `log(1 + exp(s))`, halved;
    * `listwise`: mean over golds g of `-log(exp(s_g) / (exp(s_g) + sum over distractors d of exp(s_d)))`.

    Every sample counts the same, however many documents or golds it has. A larger `strength` (scikit-learn's C)
    trusts the samples more and the prior, all weights zero, less. Both problems are convex with one minimum, so
    the fit is deterministic. Raises ValueError for a strength that is not positive and finite, an unknown loss,
    no sample, samples that differ in F, features that are not finite, and a sample without a gold or without a
    distractor.
    """
    if not 0 < strength < math.inf:
        raise ValueError(f"strength must be positive and finite, got {strength}")
    losses = {"pointwise": _pointwise, "listwise": _listwise}
    if loss not in losses:
        raise ValueError(f"loss must be one of: {', '.join(losses)}")
    _check_samples(features, gold)
    centred = [x.to(torch.float64) - x.to(torch.float64).mean(-1, keepdim=True) for x in features]
    rows = torch.cat([x.T for x in centred])
    sample_loss = losses[loss](gold)

    def objective(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        w = torch.tensor(weights, device=rows.device, requires_grad=True)
        # Divided by the weight of the data, which moves no minimum: the tolerance then fits any strength.
        value = sample_loss(rows @ w) + w.square().sum() / (2 * strength * len(gold))
        value.backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        return value.item(), w.grad.numpy(force=True)

    bounds = [(0, None)] * rows.shape[1] if nonnegative else None
    options = {"maxiter": 10_000, "maxfun": 100_000, "ftol": 1e-14, "gtol": 1e-9}
    start = np.zeros(rows.shape[1])
    found = optimize.minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return torch.from_numpy(found.x).to(rows.device)


def choose_strength(
    features: Sequence[Tensor],
    gold: Sequence[Tensor],
    strengths: Sequence[float],
    *,
    folds: int,
    seed: int,
    loss: Loss,
    nonnegative: bool = False,
) -> tuple[float, float]:
    """The strength of `fit_weights` with the best cross-validated mean average precision over samples, and that.

    Samples are dealt to `folds` folds at random, by `seed`; each is ranked by weights fitted on the other folds.
    Of equal strengths the smallest wins, the one that trusts the samples least. Prompts of one question belong
    in one sample or they leak between folds. Raises ValueError without strengths, for fewer than two folds, for
    more folds than samples, and as `fit_weights` does.
    """
    if not strengths:
        raise ValueError("at least one strength is needed")
    if not 2 <= folds <= len(features):
        raise ValueError(f"folds must lie in [2, samples], got {folds} for {len(features)} samples")
    _check_samples(features, gold)
    shuffled = np.random.default_rng(seed).permutation(len(features))
    held_out = [set(shuffled[fold::folds].tolist()) for fold in range(folds)]
    best, chosen = -math.inf, math.nan
    for strength in sorted(strengths):
        precisions: list[float] = []
        for test in held_out:
            train = [i for i in range(len(features)) if i not in test]
            weights = fit_weights(
                [features[i] for i in train],
                [gold[i] for i in train],
                strength=strength,
                loss=loss,
                nonnegative=nonnegative,
            )
            scores = (weights @ features[i].to(torch.float64) for i in sorted(test))
            precisions += [
                float(average_precision(s, gold[i])) for s, i in zip(scores, sorted(test), strict=True)
            ]
        mean = math.fsum(precisions) / len(precisions)
        if mean > best + PRECISION_TOLERANCE:
            best, chosen = mean, strength
    return chosen, best


def _pointwise(gold: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """From the scores of all documents in a row to the mean pointwise loss of a sample."""
    labels = torch.cat(list(gold))
    share = torch.cat([torch.where(g, 0.5 / g.sum(), 0.5 / (~g).sum()) for g in gold]).to(torch.float64)
    sign = torch.where(labels, -1.0, 1.0).to(torch.float64)
    return lambda scores: (softplus(sign * scores) * share).sum() / len(gold)


def _listwise(gold: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """From the scores of all documents in a row to the mean listwise loss of a sample."""
    labels = torch.cat(list(gold))
    sample = torch.cat([torch.full((len(g),), i, device=g.device) for i, g in enumerate(gold)])
    share = torch.cat([(1 / g.sum()).expand(int(g.sum())) for g in gold]).to(torch.float64)
    place = torch.cat([torch.arange(int((~g).sum()), device=g.device) for g in gold])
    shape = (len(gold), int(place.max()) + 1)

    def loss(scores: Tensor) -> Tensor:
        padded = scores.new_full(shape, -math.inf)
        padded = padded.index_put((sample[~labels], place), scores[~labels])
        distractors = padded.logsumexp(-1)[sample[labels]]
        return (softplus(distractors - scores[labels]) * share).sum() / len(gold)

    return loss


def _mean_precision(scores: Sequence[Tensor], gold: Sequence[Tensor]) -> Tensor:
    """Mean average precision over samples of each row: one [F, D_i] and [D_i] per sample -> [F] float64."""
    return torch.stack([average_precision(s, g) for s, g in zip(scores, gold, strict=True)]).mean(0)


def _check_count(count: int) -> None:
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")


def _check_samples(features: Sequence[Tensor], gold: Sequence[Tensor]) -> None:
    if not features or len(features) != len(gold):
        raise ValueError("at least one sample is needed, each with its gold")
    if {(x.dim(), x.shape[0]) for x in features} != {(2, features[0].shape[0])} or not len(features[0]):
        raise ValueError("features must be [F, D_i] with one F of at least 1 for all samples")
    for x, g in zip(features, gold, strict=True):
        check_labelled(x, g)
