"""Evaluate: how well each method ranks the documents of labelled questions, with intervals and latency."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from headbank.errors import InputError, InputTooLong
from headbank.numerics.metrics import mean_with_interval, paired_p_value, rank_metrics_many
from headbank.rerankers.base import Reranker
from headbank.rerankers.heads import HeadReranker
from headbank.types import VIEWS, RankOptions, Sample, View


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    label: str
    reranker: Reranker
    options: RankOptions


@dataclass(frozen=True)
class Evaluation:
    """What the methods did on the questions that all of them could rank."""

    questions: int
    skipped: dict[str, list[str]]
    """Ids of questions left out, by reason."""
    metrics: dict[str, dict[str, dict[str, float]]]
    """Method -> metric -> mean, low, high (95 % bootstrap over questions)."""
    p_values: dict[str, dict[str, float]]
    """`a vs b` -> metric -> two-sided paired permutation test."""
    latency_s: dict[str, dict[str, float]]
    """Method -> median, high (largest) and questions; seconds of whole `rank` calls, methods interleaved."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {
            "questions": self.questions,
            "skipped": self.skipped,
            "metrics": self.metrics,
            "p_values": self.p_values,
            "latency_s": self.latency_s,
        }


def head_methods(reranker: HeadReranker, views: Sequence[View]) -> list[Method]:
    """One method per view of the bank's heads."""
    return [Method(f"heads ({view})", reranker, RankOptions(view=view)) for view in views]


def evaluate(
    methods: Sequence[Method],
    samples: Sequence[Sample],
    *,
    k: int = 2,
    seed: int = 0,
    latency_questions: int = 5,
    on_sample: Callable[[Sample], None] | None = None,
) -> Evaluation:
    """Rank every question's documents, in the order of the file, by every method.

    All methods on heads read one forward pass. Latency is measured apart from that, by whole `rank` calls on the
    first `latency_questions` questions, after one call of each to warm up. Questions without a relevant document or
    too long for the model are left out for every method. Raises InputError when none is left.
    """
    orders: dict[str, list[tuple[int, ...]]] = {method.label: [] for method in methods}
    relevances: list[list[int]] = []
    skipped: dict[str, list[str]] = {}
    timed: list[Sample] = []
    for sample in samples:
        if not any(document.relevance for document in sample.documents):
            skipped.setdefault("no_relevant_document", []).append(sample.id)
        else:
            try:
                ranked = _rank_all(methods, sample)
            except InputTooLong:
                skipped.setdefault("too_long", []).append(sample.id)
            else:
                for label, order in ranked.items():
                    orders[label].append(order)
                relevances.append([document.relevance for document in sample.documents])
                if len(timed) < latency_questions:
                    timed.append(sample)
        if on_sample is not None:
            on_sample(sample)
    if not relevances:
        raise InputError("data", "no question could be ranked")
    values = {label: _columns(rank_metrics_many(rows, relevances, k)) for label, rows in orders.items()}
    return Evaluation(
        questions=len(relevances),
        skipped=skipped,
        metrics={
            label: {m: mean_with_interval(v, seed) for m, v in columns.items()}
            for label, columns in values.items()
        },
        p_values=_paired(values, seed),
        latency_s=_latencies(methods, timed),
    )


def _rank_all(methods: Sequence[Method], sample: Sample) -> dict[str, tuple[int, ...]]:
    """Order per method; methods on heads share a forward pass, with the response view it also writes the answer."""
    documents = [document.content for document in sample.documents]
    ranked: dict[str, tuple[int, ...]] = {}
    on_heads = [method for method in methods if isinstance(method.reranker, HeadReranker)]
    if on_heads:
        reranker = on_heads[0].reranker
        assert isinstance(reranker, HeadReranker)
        views = tuple(view for view in VIEWS if any(method.options.view == view for method in on_heads))
        options = RankOptions(view="response" if "response" in views else "query")
        layout = reranker.layout(sample.question, documents, options)
        capture = reranker.capture(layout, views)
        for method in on_heads:
            ranked[method.label] = reranker.rank_captured(
                capture, layout, method.options.view, method.options.aggregation
            )[2]
    for method in methods:
        if method.label not in ranked:
            ranked[method.label] = method.reranker.rank(sample.question, documents, method.options).order
    return ranked


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


def _paired(values: Mapping[str, Mapping[str, Sequence[float]]], seed: int) -> dict[str, dict[str, float]]:
    return {
        f"{a} vs {b}": {
            metric: paired_p_value(values[a][metric], values[b][metric], seed) for metric in values[a]
        }
        for a, b in combinations(values, 2)
    }
