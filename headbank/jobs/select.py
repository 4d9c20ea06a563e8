"""Select: head sets, their probabilities and their honest metrics, from shards alone.

Every number comes from cross-validation over questions: no sample is ranked by heads, weights or scales that were
fitted on it.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headbank.jobs.detect import DETECTORS, Problem, SelectConfig
from headbank.numerics import activation
from headbank.numerics.evidence import (
    combine,
    expected_calibration_error,
    fit_platt,
    moments,
    platt,
    standardise,
)
from headbank.numerics.metrics import mean_with_interval, rank_metrics_many
from headbank.numerics.panels import fit_weights
from headbank.rerankers.base import by_score
from headbank.rerankers.scoring import evidence, score
from headbank.types import VOTES, Aggregation, Fusion, HeadSet

THRESHOLDS_TRIED = (0.2, 0.4, 0.6, 0.8)
FUSION_STRENGTH = 3.0
"""Of the samples against the prior: a handful of weights is well determined by a few samples."""


@dataclass(frozen=True)
class HeldOut:
    """How one detector ranks samples that it was not fitted on; the first axis is the sample."""

    values: dict[Aggregation, dict[str, list[float]]]
    """Rule -> metric -> mean over placements, one a sample."""
    z: list[Tensor]
    """Combined log-odds, one [P, D] float64 a sample."""


@dataclass(frozen=True)
class Selected:
    """A head set with the maps it was read from."""

    head_set: HeadSet
    held_out: HeldOut
    metrics: dict[str, dict[str, float]]
    """Of the set's default rule: metric -> mean with interval."""
    maps: dict[str, Tensor]
    counts: dict[str, Any]


def fold_of(groups: Sequence[Hashable], config: SelectConfig) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The fold of each sample: samples of one group share a fold, groups are dealt at random by the seed. [N]

    Raises ValueError for fewer than two groups, of which none could be held out.
    """
    distinct = list(dict.fromkeys(groups))
    folds = min(config.folds, len(distinct))
    if folds < 2:
        raise ValueError("cross-validation needs at least two questions and two folds")
    dealt = np.random.default_rng(config.seed).permutation(len(distinct)) % folds
    fold = dict(zip(distinct, dealt, strict=True))
    return np.asarray([fold[group] for group in groups], dtype=np.int64)


def _folds(problem: Problem) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Folds over questions: two samples of one question must not test each other."""
    return fold_of(problem.statistics.questions, problem.config)


def held_out(problem: Problem, detector: str) -> HeldOut:
    """Rank every sample by a head set fitted on the other folds. Raises ValueError for fewer than two questions."""
    n = problem.statistics.count
    folds = _folds(problem)
    values: dict[Aggregation, dict[str, list[float]]] = {}
    z: list[Tensor] = [torch.empty(0)] * n
    per_sample: list[dict[Aggregation, dict[str, float]]] = [{}] * n
    for fold in range(int(folds.max()) + 1):
        heads = DETECTORS[detector](problem, torch.from_numpy(np.flatnonzero(folds != fold)))
        for sample in map(int, np.flatnonzero(folds == fold)):
            per_sample[sample], z[sample] = _rank(problem, sample, heads)
    for row in per_sample:
        for rule, metrics in row.items():
            for name, value in metrics.items():
                values.setdefault(rule, {}).setdefault(name, []).append(value)
    return HeldOut(values, z)


def _rank(
    problem: Problem, sample: int, heads: HeadSet
) -> tuple[dict[Aggregation, dict[str, float]], Tensor]:
    """Metrics per rule (mean over placements) and combined log-odds [P, D] of one sample."""
    statistics = problem.statistics
    rules = _rules(heads)
    orders: dict[Aggregation, list[tuple[int, ...]]] = {rule: [] for rule in rules}
    z = []
    for placement in range(statistics.placements):
        reading = statistics.reading(sample, placement, heads.heads, "calibrated" in rules)
        z.append(evidence(heads, reading, heads.heads))
        for rule in rules:
            orders[rule].append(score(heads, reading, heads.heads, rule).order)
    grades = [statistics.shards[sample].relevance.tolist()] * statistics.placements
    rows = {rule: rank_metrics_many(found, grades, problem.config.k) for rule, found in orders.items()}
    means = {
        rule: {name: float(np.mean([row[name] for row in found])) for name in found[0]}
        for rule, found in rows.items()
    }
    return means, torch.stack(z)


def _rules(heads: HeadSet) -> tuple[Aggregation, ...]:
    """What is measured of a head set: the papers' votes of a small panel, and the set's own rule."""
    votes = VOTES if heads.detector == "expert" else ()
    return tuple(dict.fromkeys((*votes, "evidence", heads.default_aggregation)))


def select(problem: Problem, detector: str) -> Selected:
    """The head set of a detector, fitted on all samples, with its probabilities fitted on held-out log-odds.

    Raises ValueError for thresholds outside [0, 1], no eligible layer, or fewer than two questions.
    """
    heads = DETECTORS[detector](problem, torch.arange(problem.statistics.count))
    found = held_out(problem, detector)
    rule = _best_rule(heads, found, problem.config)
    labels = [problem.statistics.gold[i].expand(len(z), -1) for i, z in enumerate(found.z)]
    measured = {name: intervals(values, problem.config) for name, values in found.values.items()}
    scale = fit_platt(torch.cat([z.flatten() for z in found.z]), torch.cat([g.flatten() for g in labels]))
    heads = replace(
        heads,
        default_aggregation=rule,
        platt=scale,
        dev_metrics={
            "protocol": f"{int(_folds(problem).max()) + 1}-fold cross-validation over questions, "
            "mean over placements",
            "samples": problem.statistics.count,
            "aggregations": measured,
            "calibration_error": calibration_error(problem, found.z),
        },
    )
    maps, counts = _expert_maps(problem) if detector == "expert" else ({}, {})
    return Selected(heads, found, measured[rule], maps, counts)


def intervals(values: Mapping[str, Sequence[float]], config: SelectConfig) -> dict[str, dict[str, float]]:
    """Mean and 95 % interval of each metric."""
    return {name: mean_with_interval(numbers, config.seed) for name, numbers in values.items()}


def calibration_error(problem: Problem, z: Sequence[Tensor]) -> float:
    """Expected calibration error of probabilities whose scale was fitted on the other folds."""
    folds = _folds(problem)
    probabilities, labels = [], []
    for fold in range(int(folds.max()) + 1):
        train = [int(i) for i in np.flatnonzero(folds != fold)]
        test = [int(i) for i in np.flatnonzero(folds == fold)]
        a, b = fit_platt(*_pooled(problem, z, train))
        scores, relevant = _pooled(problem, z, test)
        probabilities.append(platt(scores, a, b))
        labels.append(relevant)
    return expected_calibration_error(torch.cat(probabilities), torch.cat(labels))


def _pooled(problem: Problem, z: Sequence[Tensor], samples: Sequence[int]) -> tuple[Tensor, Tensor]:
    scores = torch.cat([z[i].flatten() for i in samples])
    labels = torch.cat([problem.statistics.gold[i].expand(len(z[i]), -1).flatten() for i in samples])
    return scores, labels


def _best_rule(heads: HeadSet, found: HeldOut, config: SelectConfig) -> Aggregation:
    """The set's own rule, unless another has an NDCG@k on held-out samples above that rule's interval."""
    metric = f"NDCG@{config.k}"
    means = {rule: float(np.mean(values[metric])) for rule, values in found.values.items()}
    own = heads.default_aggregation
    best = max(means, key=lambda rule: means[rule])
    high = mean_with_interval(found.values[own][metric], config.seed)["high"]
    return best if means[best] > high else own


def fuse(
    problem: Problem,
    heads: HeadSet,
    z: Sequence[Tensor],
    voters: Mapping[str, Sequence[Tensor]],
    dense_model: str,
) -> Fusion:
    """Weights of a head set and other voters, fitted on held-out log-odds z, one [P, D] a sample.

    `voters`: name -> one [D] a sample. The metrics come from a second cross-validation over the same samples.
    """
    features = [
        [torch.stack([placement, *(found[i] for found in voters.values())]) for placement in rows]
        for i, rows in enumerate(z)
    ]
    everything = list(range(len(z)))
    mean, std, weights = _fit_fusion(problem, features, everything)
    folds = _folds(problem)
    fused: list[Tensor] = [torch.empty(0)] * len(z)
    for fold in range(int(folds.max()) + 1):
        fitted = _fit_fusion(problem, features, [i for i in everything if folds[i] != fold])
        for i in map(int, np.flatnonzero(folds == fold)):
            fused[i] = torch.stack([_apply_fusion(x, *fitted) for x in features[i]])
    return Fusion(
        name=problem.name("fusion"),
        head_set=heads.name,
        voters=tuple(voters),
        dense_model=dense_model,
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
        weights=tuple(weights.tolist()),
        platt=fit_platt(*_pooled(problem, fused, everything)),
        dev_metrics={
            **intervals(_metrics(problem, fused), problem.config),
            "calibration_error": calibration_error(problem, fused),
        },
    )


def _fit_fusion(
    problem: Problem, features: Sequence[Sequence[Tensor]], samples: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    rows = [x for i in samples for x in features[i]]
    gold = [problem.statistics.gold[i] for i in samples for _ in features[i]]
    mean, std = moments(rows)
    standard = [standardise(x, mean, std) for x in rows]
    strength = FUSION_STRENGTH / problem.statistics.placements
    weights = fit_weights(standard, gold, strength=strength, loss="listwise", nonnegative=True)
    return mean, std, weights


def _apply_fusion(features: Tensor, mean: Tensor, std: Tensor, weights: Tensor) -> Tensor:
    return combine(standardise(features, mean, std), weights)


def _metrics(problem: Problem, z: Sequence[Tensor]) -> dict[str, list[float]]:
    """Metrics of the order of z, mean over placements, one a sample."""
    found: dict[str, list[float]] = {}
    for i, rows in enumerate(z):
        grades = [problem.statistics.shards[i].relevance.tolist()] * len(rows)
        metrics = rank_metrics_many([by_score(row.tolist()) for row in rows], grades, problem.config.k)
        for name in metrics[0]:
            found.setdefault(name, []).append(float(np.mean([m[name] for m in metrics])))
    return found


def _expert_maps(problem: Problem) -> tuple[dict[str, Tensor], dict[str, Any]]:
    found, config = problem.activation, problem.config
    f = activation.frequency(found.active)
    strength = activation.strength(found.active, found.gold_mean)

    def passed(tau_f: float) -> tuple[Tensor, Tensor]:
        passing = activation.passes(f, strength, tau_f, config.tau_p, problem.eligible)
        return activation.expert(passing), activation.sensitive(passing)

    experts, sensitive = passed(config.tau_f)
    maps = {
        "frequency": f,
        "strength": strength,
        "soft": found.precision.mean(0),
        "expert": experts.to(torch.uint8),
        "sensitive": sensitive.to(torch.uint8),
    }
    tried = []
    for tau_f in THRESHOLDS_TRIED:
        some, any_place = passed(tau_f)
        counts = {"experts": int(some.sum()), "sensitive": int(any_place.sum())}
        tried.append({"tau_f": tau_f, "tau_p": config.tau_p, **counts})
    return {f"{problem.name('expert')}.{name}": value for name, value in maps.items()}, {
        "experts": int(experts.sum()),
        "sensitive": int(sensitive.sum()),
        "sensitive_per_layer": sensitive.sum(-1).tolist(),
        "thresholds_tried": tried,
        "best_worst_placement_frequency": float(f.amin(0).max()),
    }


def describe(config: SelectConfig) -> dict[str, Any]:
    """The configuration as JSON values, for the bank's training record."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()
    }
