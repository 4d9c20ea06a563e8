"""Select: expert heads and how well they do, from shards alone. Seconds, repeatable with other thresholds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headbank.jobs.capture import Shard
from headbank.numerics import activation
from headbank.numerics.metrics import mean_with_interval, rank_metrics_many
from headbank.numerics.spans import span_mean
from headbank.numerics.voting import vote_order
from headbank.types import AGGREGATIONS, Aggregation, HeadId, HeadSet, View

THRESHOLDS_TRIED = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class SelectConfig:
    """Thresholds of the paper and the size of the panel."""

    count: int = 5
    """Voting heads."""
    tau_f: float = 0.6
    """Least share of samples on which a head is activated."""
    tau_p: float = 0.9
    """Quantile over heads that a head's strength must reach."""
    folds: int = 5
    k: int = 2
    """Depth of P@k, NDCG@k and R@k."""
    seed: int = 0
    """Seeds the folds and the bootstrap."""


@dataclass(frozen=True)
class ViewStatistics:
    """What every sample says about every head, for one view; the first axis is the sample."""

    means: tuple[Tensor, ...]
    """Mean attention per document, one [P, L, H, D] float64 a sample (D differs between samples)."""
    gold: tuple[Tensor, ...]
    """[D] bool a sample."""
    active: Tensor
    """[N, P, L, H] bool"""
    gold_mean: Tensor
    """Mean attention over the gold documents. [N, P, L, H] float64"""
    precision: Tensor
    """Average precision. [N, P, L, H] float64"""


@dataclass(frozen=True)
class Selected:
    """A head set with the maps it was read from."""

    head_set: HeadSet
    maps: dict[str, Tensor]
    counts: dict[str, Any]


def view_statistics(shards: Sequence[Shard], view: View) -> ViewStatistics:
    """Per-sample statistics of one view. Raises ValueError without shards."""
    if not shards:
        raise ValueError("no usable calibration sample")
    means = tuple(span_mean(shard.mass[view], shard.lengths) for shard in shards)
    gold = tuple(shard.gold for shard in shards)
    pairs = list(zip(means, gold, strict=True))
    return ViewStatistics(
        means,
        gold,
        torch.stack([activation.is_activated(m, g) for m, g in pairs]),
        torch.stack([m[..., g].mean(-1) for m, g in pairs]),
        torch.stack([activation.average_precision(m, g) for m, g in pairs]),
    )


def choose(
    statistics: ViewStatistics, index: Tensor, config: SelectConfig, eligible: Tensor | None
) -> activation.Selection:
    """Expert heads of the samples `index` [n] int64. Raises ValueError as `select_experts` does."""
    active = statistics.active[index]
    return activation.select_experts(
        activation.frequency(active),
        activation.strength(active, statistics.gold_mean[index]),
        statistics.precision[index].mean(0),
        config.count,
        config.tau_f,
        config.tau_p,
        eligible,
    )


def select(
    statistics: ViewStatistics, view: View, config: SelectConfig, eligible: Tensor | None = None
) -> Selected:
    """The head set `expert.<view>`, chosen on all samples; its metrics come from cross-validation.

    In each fold heads are chosen on the other folds and measured on this one, so no sample is ranked by heads that
    were chosen on it. `eligible` [L] bool leaves out layers whose window hides documents. Raises ValueError for
    thresholds outside [0, 1], or when no layer is eligible.
    """
    n = len(statistics.means)
    everything = torch.arange(n)
    chosen = choose(statistics, everything, config, eligible)
    dev = cross_validate(statistics, config, eligible)
    best = _best_aggregation(dev, config.k)
    heads = HeadSet(
        name=f"expert.{view}",
        view=view,
        heads=chosen.heads,
        default_aggregation=best,
        strict_experts=chosen.strict,
        dev_metrics=dev,
    )
    f = activation.frequency(statistics.active)
    strength = activation.strength(statistics.active, statistics.gold_mean)
    passed = activation.passes(f, strength, config.tau_f, config.tau_p, eligible)
    experts, sensitive = activation.expert(passed), activation.sensitive(passed)
    maps = {
        "frequency": f,
        "strength": strength,
        "soft": statistics.precision.mean(0),
        "expert": experts.to(torch.uint8),
        "sensitive": sensitive.to(torch.uint8),
    }
    counts = {
        "experts": int(experts.sum()),
        "sensitive": int(sensitive.sum()),
        "sensitive_per_layer": sensitive.sum(-1).tolist(),
        "thresholds_tried": [_tried(f, strength, tau, config.tau_p, eligible) for tau in THRESHOLDS_TRIED],
        "best_worst_placement_frequency": float(f.amin(0).max()),
    }
    return Selected(heads, {f"expert.{view}.{name}": value for name, value in maps.items()}, counts)


def _tried(
    f: Tensor, strength: Tensor, tau_f: float, tau_p: float, eligible: Tensor | None
) -> dict[str, Any]:
    passed = activation.passes(f, strength, tau_f, tau_p, eligible)
    return {
        "tau_f": tau_f,
        "tau_p": tau_p,
        "experts": int(activation.expert(passed).sum()),
        "sensitive": int(activation.sensitive(passed).sum()),
    }


def cross_validate(
    statistics: ViewStatistics, config: SelectConfig, eligible: Tensor | None = None
) -> dict[str, object]:
    """Metrics per aggregation on samples that the voting heads were not chosen on.

    A sample's value is the mean over its placements; intervals are 95 % bootstrap over samples. With fewer than two
    samples there is nothing to hold out and the result says so.
    """
    n = len(statistics.means)
    if n < 2:
        return {"protocol": "none: fewer than two samples", "samples": n}
    folds = min(config.folds, n)
    fold_of = np.random.default_rng(config.seed).permutation(n) % folds
    values: dict[str, dict[str, list[float]]] = {rule: {} for rule in AGGREGATIONS}
    for fold in range(folds):
        train = torch.from_numpy(np.flatnonzero(fold_of != fold))
        heads = choose(statistics, train, config, eligible).heads
        for sample in np.flatnonzero(fold_of == fold):
            for rule in AGGREGATIONS:
                for name, value in _sample_metrics(statistics, int(sample), heads, rule, config.k).items():
                    values[rule].setdefault(name, []).append(value)
    return {
        "protocol": f"{folds}-fold cross-validation over samples, mean over placements",
        "samples": n,
        "aggregations": {
            rule: {name: mean_with_interval(numbers, config.seed) for name, numbers in metrics.items()}
            for rule, metrics in values.items()
        },
    }


def _sample_metrics(
    statistics: ViewStatistics, sample: int, heads: Sequence[HeadId], rule: Aggregation, k: int
) -> dict[str, float]:
    means, gold = statistics.means[sample], statistics.gold[sample]
    layers, numbers = [h.layer for h in heads], [h.head for h in heads]
    votes = means[:, layers, numbers]  # [P, n, D]
    orders = [vote_order(placement, rule)[1] for placement in votes]
    rows = rank_metrics_many(orders, [gold.int().tolist()] * len(orders), k)
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def _best_aggregation(dev: dict[str, Any], k: int) -> Aggregation:
    """The paper's voting, unless another has an NDCG@k on held-out samples above the interval of the paper's."""
    if "aggregations" not in dev:
        return "borda"
    scores = {rule: dev["aggregations"][rule][f"NDCG@{k}"] for rule in AGGREGATIONS}
    best = max(AGGREGATIONS, key=lambda rule: scores[rule]["mean"])
    return best if scores[best]["mean"] > scores["borda"]["high"] else "borda"


def describe(config: SelectConfig) -> dict[str, Any]:
    """The configuration as JSON values, for the bank's training record."""
    return asdict(config)
