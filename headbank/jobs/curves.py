"""How much the layer budget and the length of the answer matter, measured on held-out samples."""

from dataclasses import replace
from typing import Any

import torch

from headbank.jobs.detect import Problem
from headbank.jobs.select import held_out, intervals
from headbank.jobs.statistics import view_statistics

LAYER_SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
RESPONSE_TOKENS = (1, 2, 4, 8, 16)
CURVE_DETECTORS = ("expert", "greedy")
"""Detectors that are fast to fit; `weighted` is measured by its own budget option."""


def layer_curve(problem: Problem) -> list[dict[str, Any]]:
    """Metrics of panels within the first share of the layers, and the share of the layers that has to be computed."""
    n_layers = len(problem.eligible)
    rows = []
    before = 0
    for last in sorted({max(1, round(share * n_layers)) for share in LAYER_SHARES}):
        allowed = problem.eligible & (torch.arange(n_layers) < last)
        found = int(allowed.sum())
        # A budget that adds no layer that may vote, adds nothing to the curve.
        if found > before:
            narrow = replace(problem, eligible=allowed)
            rows.append({"layers": last, "share": last / n_layers, **_curve_row(narrow)})
        before = found
    return rows


def response_curve(problem: Problem) -> list[dict[str, Any]]:
    """Metrics of panels that read only the first written tokens."""
    statistics = problem.statistics
    longest = statistics.response_tokens or max(RESPONSE_TOKENS)
    rows = []
    for tokens in (*(t for t in RESPONSE_TOKENS if t < longest), longest):
        few = view_statistics(statistics.shards, statistics.view, statistics.style, tokens)
        rows.append({"tokens": tokens, **_curve_row(Problem(few, problem.config, problem.eligible))})
    return rows


def _curve_row(problem: Problem) -> dict[str, Any]:
    found = {}
    for detector in CURVE_DETECTORS:
        values = held_out(problem, detector).values["evidence"]
        wanted = ("MAP", f"NDCG@{problem.config.k}")
        found[detector] = intervals({metric: values[metric] for metric in wanted}, problem.config)
    return found
