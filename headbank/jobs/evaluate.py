"""Evaluate: how well each method ranks the documents of labelled questions, with intervals, tests and latency.

Every method on heads reads the same captured forward passes, kept on disk, so that other sets, rules and weights are
compared in seconds; the other methods run live.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headbank.errors import InputError, InputTooLong
from headbank.jobs.capture import AS_GIVEN, CaptureConfig, Shard, capture_folder, capture_samples
from headbank.jobs.statistics import view_statistics
from headbank.models.base import HeadRunner
from headbank.numerics.evidence import expected_calibration_error, platt
from headbank.numerics.metrics import mean_with_interval, paired_p_value, rank_metrics_many
from headbank.rerankers.base import Reranker, by_score
from headbank.rerankers.fusion import fused, raw_scores
from headbank.rerankers.scoring import evidence, score
from headbank.types import Aggregation, Fusion, HeadSet, PromptStyle, Ranking, RankOptions, Sample, View


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    label: str
    reranker: Reranker
    """Ranks whole requests: the rows that are not read from captures, and all latencies."""
    options: RankOptions
    heads: HeadSet | None = None
    """The head set whose captured attention ranks; None: the reranker runs."""
    aggregation: Aggregation | None = None
    """None: the head set's own."""
    fusion: Fusion | None = None
    """With `heads`: other voters beside them."""


@dataclass(frozen=True)
class Evaluation:
    """What the methods did on the questions that all of them could rank."""

    questions: int
    skipped: dict[str, list[str]]
    """Ids of questions left out, by reason."""
    values: dict[str, dict[str, list[float]]]
    """Method -> metric -> one value a question."""
    calibration_error: dict[str, float]
    """Expected calibration error of the methods whose scores are probabilities."""
    latency_s: dict[str, dict[str, float]]
    """Method -> median, high (largest) and questions; seconds of whole `rank` calls, methods interleaved."""

    def to_json(self, seed: int = 0) -> dict[str, Any]:
        """Plain values for a JSON file: metrics with 95 % bootstrap intervals, and paired permutation tests."""
        return {
            "questions": self.questions,
            "skipped": self.skipped,
            "metrics": {
                label: {name: mean_with_interval(values, seed) for name, values in columns.items()}
                for label, columns in self.values.items()
            },
            "p_values": paired(self.values, seed),
            "calibration_error": self.calibration_error,
            "latency_s": self.latency_s,
        }


@dataclass
class _Run:
    """Rankings of the questions so far."""

    orders: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    probabilities: dict[str, list[Tensor]] = field(default_factory=dict)
    relevances: list[list[int]] = field(default_factory=list)


def evaluate(
    methods: Sequence[Method],
    samples: Sequence[Sample],
    *,
    runner: HeadRunner | None = None,
    captures: Path | None = None,
    response_tokens: int = 16,
    k: int = 2,
    latency_questions: int = 5,
    on_sample: Callable[[Sample, bool], None] | None = None,
) -> Evaluation:
    """Rank every question's documents, in the order of the file, by every method.

    Methods with a head set need `runner` and the folder `captures`. Latency is measured apart from that, by whole
    `rank` calls on the first `latency_questions` questions, after one call of each to warm up. Questions without a
    relevant or without an irrelevant document, or too long for the model, are left out for every method. Raises
    InputError when none is left.
    """
    skipped: dict[str, list[str]] = {}
    usable = [sample for sample in samples if _has_both(sample)]
    if len(usable) < len(samples):
        skipped["one_kind_of_documents"] = [s.id for s in samples if not _has_both(s)]
    shards = {
        style: _shards(runner, usable, captures, style, views, response_tokens, on_sample, skipped)
        for style, views in _needed(methods).items()
    }
    run = _Run()
    ranked: list[Sample] = []
    for sample in usable:
        if any(sample.id not in found for found in shards.values()):
            continue
        try:
            _rank_all(methods, sample, shards, runner, response_tokens, run)
        except InputTooLong:
            skipped.setdefault("too_long", []).append(sample.id)
        else:
            ranked.append(sample)
    if not ranked:
        raise InputError("data", "no question could be ranked")
    return Evaluation(
        questions=len(ranked),
        skipped=skipped,
        values={
            label: _columns(rank_metrics_many(orders, run.relevances, k))
            for label, orders in run.orders.items()
        },
        calibration_error={
            label: _calibration_error(found, run.relevances) for label, found in run.probabilities.items()
        },
        latency_s=_latencies(methods, ranked[:latency_questions]),
    )


def pooled(evaluations: Sequence[Evaluation]) -> dict[str, dict[str, list[float]]]:
    """Values of several data sets, one after the other, for methods and metrics that all of them have."""
    labels = [label for label in evaluations[0].values if all(label in e.values for e in evaluations)]
    return {
        label: {
            metric: [value for e in evaluations for value in e.values[label][metric]]
            for metric in evaluations[0].values[label]
        }
        for label in labels
    }


def paired(values: Mapping[str, Mapping[str, Sequence[float]]], seed: int = 0) -> dict[str, dict[str, float]]:
    """`a vs b` -> metric -> p of a two-sided paired permutation test."""
    return {
        f"{a} vs {b}": {
            metric: paired_p_value(values[a][metric], values[b][metric], seed) for metric in values[a]
        }
        for a, b in combinations(values, 2)
    }


def _has_both(sample: Sample) -> bool:
    relevant = [document.relevance > 0 for document in sample.documents]
    return any(relevant) and not all(relevant)


def _needed(methods: Sequence[Method]) -> dict[PromptStyle, tuple[View, ...]]:
    """The captures that the head sets need: the views of every style."""
    needed: dict[PromptStyle, dict[View, None]] = {}
    for method in methods:
        if method.heads is not None:
            needed.setdefault(method.heads.style, {"query": None})[method.heads.view] = None
    return {style: tuple(views) for style, views in needed.items()}


def _shards(
    runner: HeadRunner | None,
    samples: Sequence[Sample],
    captures: Path | None,
    style: PromptStyle,
    views: tuple[View, ...],
    response_tokens: int,
    on_sample: Callable[[Sample, bool], None] | None,
    skipped: dict[str, list[str]],
) -> dict[str, Shard]:
    assert runner is not None and captures is not None, "head sets need a runner and a folder"
    config = CaptureConfig(AS_GIVEN, views, style, response_tokens=response_tokens)
    folder = capture_folder(captures, runner.info, config)
    shards, rejected = capture_samples(runner, samples, config, folder, on_sample)
    for reason, ids in rejected.items():
        known = skipped.setdefault(reason, [])
        known.extend(i for i in ids if i not in known)
    return {shard.sample_id: shard for shard in shards}


def _rank_all(
    methods: Sequence[Method],
    sample: Sample,
    shards: Mapping[PromptStyle, Mapping[str, Shard]],
    runner: HeadRunner | None,
    response_tokens: int,
    run: _Run,
) -> None:
    """Rank one question by every method; nothing is kept when one of them cannot."""
    documents = [document.content for document in sample.documents]
    live: dict[str, Ranking] = {}

    def ranking(reranker: Reranker, options: RankOptions) -> Ranking:
        if reranker.name not in live:
            live[reranker.name] = reranker.rank(sample.question, documents, options)
        return live[reranker.name]

    voters = {m.reranker.name: m.reranker for m in methods if m.heads is None}
    found: dict[str, tuple[tuple[int, ...], Tensor | None]] = {}
    for method in methods:
        if method.heads is None:
            found[method.label] = (ranking(method.reranker, method.options).order, None)
            continue
        assert runner is not None
        shard = shards[method.heads.style][sample.id]
        features = {
            name: raw_scores(ranking(voters[name], RankOptions()))
            for name in (method.fusion.voters if method.fusion else ())
        }
        found[method.label] = _rank_heads(method, shard, runner, response_tokens, features)
    for label, (order, probability) in found.items():
        run.orders.setdefault(label, []).append(order)
        if probability is not None:
            run.probabilities.setdefault(label, []).append(probability)
    run.relevances.append([document.relevance for document in sample.documents])


def _rank_heads(
    method: Method, shard: Shard, runner: HeadRunner, response_tokens: int, features: Mapping[str, Tensor]
) -> tuple[tuple[int, ...], Tensor | None]:
    """Order of one captured question by a head set, and P(relevant) [D] where its rule gives that."""
    heads = method.heads
    assert heads is not None
    rule = method.aggregation or heads.default_aggregation
    tokens = None
    if heads.view == "response":
        tokens = min(response_tokens, heads.response_tokens or response_tokens)
    needed = shard.prompt_tokens + (tokens or 0)
    windows = runner.info.windows
    voters = [head for head in heads.heads if (windows[head.layer] or needed) >= needed]
    if not voters:
        raise InputTooLong("documents", f"take {needed} tokens, no voting head sees them", needed)
    statistics = view_statistics([shard], heads.view, heads.style, tokens, heads.reweighting)
    reading = statistics.reading(0, 0, voters, tokens=rule == "calibrated" and method.fusion is None)
    if method.fusion is not None:
        z = fused(method.fusion, evidence(heads, reading, voters), features)
        return by_score(z.tolist()), platt(z, *method.fusion.platt)
    scores = score(heads, reading, voters, rule)
    if scores.raw is None or heads.platt is None:
        return scores.order, None
    return scores.order, torch.tensor(scores.scores, dtype=torch.float64)


def _calibration_error(probabilities: Sequence[Tensor], relevances: Sequence[Sequence[int]]) -> float:
    labels = torch.tensor([grade > 0 for grades in relevances for grade in grades])
    return expected_calibration_error(torch.cat(list(probabilities)), labels)


def _latencies(methods: Sequence[Method], samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    seconds: dict[str, list[float]] = {method.label: [] for method in methods}
    for turn, sample in enumerate([*samples[:1], *samples]):
        documents = [document.content for document in sample.documents]
        for method in methods:
            started = time.perf_counter()
            method.reranker.rank(sample.question, documents, method.options)
            if turn > 0:
                seconds[method.label].append(time.perf_counter() - started)
    return {
        label: {"median": float(np.median(values)), "high": max(values), "questions": len(values)}
        for label, values in seconds.items()
        if values
    }


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in rows[0]}
