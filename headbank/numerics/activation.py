"""Expert heads: which heads find the gold documents wherever these are placed (Expert Heads, ICLR 2026).

Every sample is shown in P placements, the block of its golds moved through the distractors. The functions
follow the paper's order: activation of a head on one prompt, its frequency and strength over samples, the
two thresholds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headbank.types import HeadId


@dataclass(frozen=True)
class Selection:
    """Voting heads, best first; the first `strict` of them are experts, the others soft fill."""

    heads: tuple[HeadId, ...]
    strict: int


def is_activated(means: Tensor, gold: Tensor) -> Tensor:
    """A head is activated iff `min over golds of A > max over distractors of A`, strictly.

    `means` [..., D] is the mean attention per document, `gold` [D] bool. Returns [...] bool. Raises
    ValueError unless there are both golds and distractors, and for values that are not finite.
    """
    _check_documents(means, gold)
    if bool(gold.all()):
        raise ValueError("activation needs at least one distractor")
    return means[..., gold].amin(-1) > means[..., ~gold].amax(-1)


def frequency(active: Tensor) -> Tensor:
    """`f[p,l,h]`: the share of samples on which the head is activated.

    `active` is [N, P, L, H] bool. Returns [P, L, H] float64. Raises ValueError for N = 0.
    """
    if active.shape[0] == 0:
        raise ValueError("frequency needs at least one sample")
    return active.sum(0).to(torch.float64) / active.shape[0]


def strength(active: Tensor, gold_mean: Tensor) -> Tensor:
    """`Abar[p,l,h]`: mean attention on the golds over the samples where the head is activated.

    `active` [N, P, L, H] bool, `gold_mean` [N, P, L, H]. Returns [P, L, H] float64, 0 where a head is never
    activated.
    """
    total = torch.where(active, gold_mean.to(torch.float64), 0.0).sum(0)
    return total / active.sum(0).clamp(min=1)


def passes(
    f: Tensor, strength: Tensor, tau_f: float = 0.6, tau_p: float = 0.9, eligible: Tensor | None = None
) -> Tensor:
    """`f >= tau_f` and `Abar >= the tau_p quantile of Abar` over the eligible heads of the same placement.

    `f` and `strength` are [P, L, H], `eligible` [L] bool (None: all layers; a layer whose window hides
    documents is not). The quantile interpolates linearly between heads. Heads of other layers and heads
    never activated (f = 0) do not pass. Returns [P, L, H] bool. Raises ValueError for thresholds outside [0,
    1], values that are not finite, no placement, or no eligible head.
    """
    if not (0 <= tau_f <= 1 and 0 <= tau_p <= 1):
        raise ValueError(f"tau_f and tau_p must lie in [0, 1], got {tau_f} and {tau_p}")
    _check_finite(f, strength)
    allowed = _eligible_layers(f, eligible)
    threshold = strength[:, allowed].to(torch.float64).flatten(1).quantile(tau_p, dim=1)[:, None, None]
    return (f >= tau_f) & (f > 0) & (strength >= threshold) & allowed[:, None]


def sensitive(passed: Tensor) -> Tensor:
    """Heads that pass in at least one placement: [P, L, H] bool -> [L, H] bool."""
    return passed.any(0)


def expert(passed: Tensor) -> Tensor:
    """Heads that pass in every placement: [P, L, H] bool -> [L, H] bool."""
    return passed.all(0)


def average_precision(means: Tensor, gold: Tensor) -> Tensor:
    """`AP = mean over golds g of (golds ranked at or above g) / rank(g)`, ranked by `means` descending.

    The soft form of activation: 1 when all golds lead. `means` [..., D], `gold` [D] bool; equal means rank
    by input index. Returns [...] float64. Raises ValueError without a gold, and for values that are not
    finite.
    """
    _check_documents(means, gold)
    hits = gold[means.argsort(dim=-1, descending=True, stable=True)]
    rank = torch.arange(1, gold.shape[0] + 1, device=means.device)
    precision = hits.cumsum(-1).to(torch.float64) / rank
    return (precision * hits).sum(-1) / gold.sum()


def select_experts(
    f: Tensor,
    strength: Tensor,
    soft: Tensor,
    count: int = 5,
    tau_f: float = 0.6,
    tau_p: float = 0.9,
    eligible: Tensor | None = None,
) -> Selection:
    """Choose `count` voting heads: the experts, then the heads that rank golds best in their worst placement.

    `f`, `strength` and `soft` (mean average precision over samples) are [P, L, H], `eligible` [L] bool.
    Experts go by the minimum over placements of f, then the mean of Abar, then (layer, head); the fill goes
    by the minimum of `soft`, then its mean, then (layer, head). Fewer than `count` heads come back only when
    fewer are eligible. Raises ValueError as `passes` does, and for a count below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    _check_finite(soft)
    is_expert = expert(passes(f, strength, tau_f, tau_p, eligible))
    allowed = _eligible_layers(f, eligible)[:, None].expand_as(is_expert)
    experts = _ordered(is_expert, f.amin(0), strength.to(torch.float64).mean(0))[:count]
    fill = _ordered(allowed & ~is_expert, soft.amin(0), soft.to(torch.float64).mean(0))
    return Selection(heads=(*experts, *fill[: count - len(experts)]), strict=len(experts))


def _ordered(chosen: Tensor, first: Tensor, second: Tensor) -> list[HeadId]:
    """The chosen heads by `first` and then `second` descending, then (layer, head); all are [L, H]."""
    major, minor = first.tolist(), second.tolist()
    heads = [HeadId(layer, head) for layer, head in chosen.nonzero().tolist()]
    return sorted(heads, key=lambda h: (-major[h.layer][h.head], -minor[h.layer][h.head], h))


def _eligible_layers(f: Tensor, eligible: Tensor | None) -> Tensor:
    placements, layers, _ = f.shape
    if placements == 0:
        raise ValueError("selection needs at least one placement")
    allowed = torch.ones(layers, dtype=torch.bool, device=f.device) if eligible is None else eligible
    if not bool(allowed.any()):
        raise ValueError("selection needs at least one eligible layer")
    return allowed


def _check_documents(means: Tensor, gold: Tensor) -> None:
    if gold.dtype != torch.bool or gold.shape != means.shape[-1:]:
        raise ValueError(f"gold must be bool [D] with D = {means.shape[-1]}")
    if not bool(gold.any()):
        raise ValueError("activation and average precision need at least one gold document")
    _check_finite(means)


def _check_finite(*tensors: Tensor) -> None:
    if not all(bool(t.isfinite().all()) for t in tensors):
        raise ValueError("attention, frequency, strength and precision must be finite")
