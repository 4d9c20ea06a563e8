"""Detectors: from the statistics of some samples to a head set. Seconds, repeatable with other thresholds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headbank.jobs.statistics import Activation, ViewStatistics, activation_of
from headbank.numerics import activation
from headbank.numerics.contrastive import contrastive_score
from headbank.numerics.evidence import moments, standardise
from headbank.numerics.panels import choose_strength, fit_weights, greedy_panel, select_top
from headbank.numerics.qr import qr_score
from headbank.types import Aggregation, HeadId, HeadSet, Reweighting, View


@dataclass(frozen=True)
class SelectConfig:
    """Thresholds of the papers, sizes of the panels, and what is tried."""

    count: int = 5
    """Voting heads of `expert`."""
    tau_f: float = 0.6
    """Least share of samples on which an expert is activated."""
    tau_p: float = 0.9
    """Quantile over heads that an expert's strength must reach."""
    panel: int = 8
    """Most heads of `qr`, `contrastive` and `greedy`."""
    temperature: float = 0.1
    """Of `contrastive`, for shares of a head's attention on documents."""
    exponents: tuple[float, ...] = (0.0, 0.5, 1.0)
    """Length exponents tried for `evidence`."""
    strengths: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    """Of the samples against the prior, tried for `weighted`."""
    max_layer: float = 1.0
    """Heads are taken from this share of the layers, counted from the first."""
    reweighting: tuple[Reweighting, ...] = ()
    """ReAttn's reweighting of tokens, in the query view."""
    folds: int = 5
    k: int = 2
    """Depth of P@k, NDCG@k and R@k."""
    seed: int = 0
    """Seeds the folds and the bootstrap."""


@dataclass
class Problem:
    """The samples of one view and style, with what several detectors need of them."""

    statistics: ViewStatistics
    config: SelectConfig
    eligible: Tensor
    """Layers whose heads may vote. [L] bool"""
    _activation: Activation | None = field(default=None, repr=False)

    @property
    def activation(self) -> Activation:
        """Activation of all samples, computed once."""
        if self._activation is None:
            self._activation = activation_of(self.statistics)
        return self._activation

    def name(self, detector: str) -> str:
        """Name of a head set in the bank."""
        return f"{detector}.{self.statistics.view}.{self.statistics.style.layout}"

    def rows(self) -> list[int]:
        """Rows of `log_odds` whose heads may vote."""
        return [i for i, head in enumerate(self.statistics.heads) if bool(self.eligible[head.layer])]


def _head_set(
    problem: Problem,
    index: Tensor,
    detector: str,
    heads: Sequence[HeadId],
    rule: Aggregation,
    *,
    exponent: float | None = None,
    weights: Sequence[float] = (),
    strict: int = 0,
) -> HeadSet:
    """A head set with the moments of its log-odds over the samples `index`; exponent None: the best on them."""
    statistics = problem.statistics
    rows = [head.layer * statistics.mass[0].shape[2] + head.head for head in heads]
    if exponent is None:
        exponent = max(problem.config.exponents, key=lambda e: (_mean_precision(problem, index, rows, e), -e))
    mean, std = moments([statistics.log_odds(exponent)[i][p, rows] for i, p in _pairs(problem, index)])
    return HeadSet(
        problem.name(detector),
        detector,
        statistics.view,
        tuple(heads),
        rule,
        style=statistics.style,
        strict_experts=strict,
        exponent=exponent,
        z_mean=tuple(mean.tolist()),
        z_std=tuple(std.tolist()),
        weights=tuple(weights),
        response_tokens=statistics.response_tokens,
        reweighting=statistics.reweighting,
    )


def _pairs(problem: Problem, index: Tensor) -> list[tuple[int, int]]:
    """(sample, placement) of all prompts of the samples."""
    return [(int(i), p) for i in index for p in range(problem.statistics.placements)]


def _mean_precision(problem: Problem, index: Tensor, rows: Sequence[int], exponent: float) -> float:
    """Mean average precision of the unweighted panel on the samples."""
    features, gold = _features(problem, index, list(rows), exponent)
    precision = [activation.average_precision(x.mean(0), g) for x, g in zip(features, gold, strict=True)]
    return float(torch.stack(precision).mean())


def _features(
    problem: Problem, index: Tensor, rows: list[int], exponent: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Standardised log-odds [n, D] and golds [D] of every prompt of the samples."""
    odds = problem.statistics.log_odds(exponent)
    zs = [odds[i][p, rows] for i, p in _pairs(problem, index)]
    mean, std = moments(zs)
    gold = [problem.statistics.gold[i] for i, _ in _pairs(problem, index)]
    return [standardise(z, mean, std) for z in zs], gold


def expert(problem: Problem, index: Tensor) -> HeadSet:
    """Expert Heads (ICLR 2026), filled softly; the paper's unweighted vote."""
    found = problem.activation.of(index)
    config = problem.config
    chosen = activation.select_experts(
        activation.frequency(found.active),
        activation.strength(found.active, found.gold_mean),
        found.precision.mean(0),
        config.count,
        config.tau_f,
        config.tau_p,
        problem.eligible,
    )
    return _head_set(problem, index, "expert", chosen.heads, "borda", strict=chosen.strict)


def qr(problem: Problem, index: Tensor) -> HeadSet:
    """QRHead (arXiv 2506.09944): attention on golds less that of the content-free query, summed when ranking."""
    statistics = problem.statistics
    scores = [
        qr_score(statistics.mass[i][p], statistics.shards[i].null.mass[p], statistics.gold[i])
        for i, p in _pairs(problem, index)
    ]
    heads = select_top(torch.stack(scores).mean(0), problem.config.panel, problem.eligible)
    return _head_set(problem, index, "qr", heads, _calibrated(statistics.view))


def contrastive(problem: Problem, index: Tensor) -> HeadSet:
    """CoRe (arXiv 2510.02219): heads that prefer golds to distractors, summed when ranking."""
    statistics = problem.statistics
    scores = [
        contrastive_score(statistics.means(int(i)), statistics.gold[int(i)], problem.config.temperature)
        for i in index
    ]
    heads = select_top(torch.stack(scores).mean((0, 1)), problem.config.panel, problem.eligible)
    return _head_set(problem, index, "contrastive", heads, _calibrated(statistics.view))


def _calibrated(view: View) -> Aggregation:
    """The papers subtract the content-free query's attention; an answer has no such counterpart."""
    return "calibrated" if view == "query" else "evidence"


def greedy(problem: Problem, index: Tensor) -> HeadSet:
    """Forward selection of heads whose mean evidence ranks the golds best."""
    rows = problem.rows()
    best: tuple[float, float, list[int]] | None = None
    for exponent in problem.config.exponents:
        features, gold = _features(problem, index, rows, exponent)
        panel = [rows[i] for i in greedy_panel(features, gold, problem.config.panel)]
        precision = _mean_precision(problem, index, panel, exponent)
        if best is None or precision > best[0]:
            best = (precision, exponent, panel)
    assert best is not None, "at least one exponent is tried"
    heads = [problem.statistics.heads[row] for row in best[2]]
    return _head_set(problem, index, "greedy", heads, "evidence", exponent=best[1])


def weighted(problem: Problem, index: Tensor) -> HeadSet:
    """L2-regularised weights over the evidence of all heads; first exponent, then strength by cross-validation inside.

    Heads come in the order of what they count.
    """
    rows = problem.rows()
    config = problem.config
    exponent, strength = config.exponents[0], config.strengths[0]
    if len(index) > 1:
        usual = config.strengths[len(config.strengths) // 2]
        exponent = max(
            config.exponents, key=lambda e: (_inner_precision(problem, index, rows, e, (usual,))[1], -e)
        )
        strength, _ = _inner_precision(problem, index, rows, exponent, config.strengths)
    features, gold = _features(problem, index, rows, exponent)
    # The loss is a sum over prompts, and the strength was chosen with one prompt a sample.
    strength /= problem.statistics.placements
    weights = fit_weights(features, gold, strength=strength, loss="listwise")
    order = weights.abs().argsort(descending=True, stable=True)
    heads = [problem.statistics.heads[rows[i]] for i in order.tolist()]
    return _head_set(
        problem, index, "weighted", heads, "evidence", exponent=exponent, weights=weights[order].tolist()
    )


def _inner_precision(
    problem: Problem, index: Tensor, rows: list[int], exponent: float, strengths: Sequence[float]
) -> tuple[float, float]:
    """The best of some strengths and its mean average precision, cross-validated within the samples."""
    middle = problem.statistics.placements // 2
    # One prompt a sample: placements of one question must not lie in different folds.
    odds = [problem.statistics.log_odds(exponent)[int(i)][middle, rows] for i in index]
    mean, std = moments(odds)
    return choose_strength(
        [standardise(z, mean, std) for z in odds],
        [problem.statistics.gold[int(i)] for i in index],
        strengths,
        folds=min(problem.config.folds, len(index)),
        seed=problem.config.seed,
        loss="listwise",
    )


def icr(problem: Problem, index: Tensor) -> HeadSet:
    """ICR (arXiv 2410.02642): all heads, nothing selected."""
    heads = [problem.statistics.heads[row] for row in problem.rows()]
    return _head_set(problem, index, "icr", heads, _calibrated(problem.statistics.view), exponent=1.0)


Detector = Callable[[Problem, Tensor], HeadSet]

DETECTORS: dict[str, Detector] = {
    "expert": expert,
    "weighted": weighted,
    "greedy": greedy,
    "contrastive": contrastive,
    "qr": qr,
    "icr": icr,
}
