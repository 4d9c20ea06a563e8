"""Curves: what fewer layers and fewer written tokens cost."""

import pytest
import torch

from headbank.jobs import curves
from headbank.jobs.curves import layer_curve, response_curve
from headbank.jobs.detect import Problem
from tests.jobs.shards import planted_shards, problem_of, shard_of, with_response

METRICS = {"MAP", "NDCG@2"}


def deep(n_layers: int, planted: int, n: int = 6, layers: list[bool] | None = None) -> Problem:
    """One head a layer; that of one layer finds the gold, the others see every document alike."""
    shards = []
    for i in range(n):
        mass = torch.full((1, n_layers, 1, 4), 0.01)
        mass[0, planted, 0, i % 4] = 0.5
        shards.append(shard_of(mass, [d == i % 4 for d in range(4)], question=i))
    return problem_of(shards, layers=layers)


def test_quality_comes_with_the_layer_that_finds_the_gold() -> None:
    rows = layer_curve(deep(10, planted=5))
    assert [row["layers"] for row in rows] == [2, 3, 4, 5, 6, 7, 8, 10]
    assert [row["share"] for row in rows] == [layers / 10 for layers in (2, 3, 4, 5, 6, 7, 8, 10)]
    for row in rows:
        assert set(row) == {"layers", "share", "expert", "greedy"}
        for detector in ("expert", "greedy"):
            assert set(row[detector]) == METRICS
            assert set(row[detector]["MAP"]) == {"mean", "low", "high"}
            assert (row[detector]["MAP"]["mean"] == 1.0) is (row["layers"] > 5)


def test_budgets_that_are_the_same_layers_are_measured_once() -> None:
    assert [row["layers"] for row in layer_curve(deep(3, planted=1))] == [1, 2, 3]
    assert [row["layers"] for row in layer_curve(deep(1, planted=0))] == [1]


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ([True] * 4 + [False] * 6, [2, 3, 4]),  # heads are taken from the first four layers only
        ([False] * 4 + [True] * 6, [5, 6, 7, 8, 10]),  # no head of the first four sees the whole prompt
    ],
)
def test_budgets_without_a_new_layer_that_may_vote_are_left_out(
    allowed: list[bool], expected: list[int]
) -> None:
    assert [row["layers"] for row in layer_curve(deep(10, 3, layers=allowed))] == expected


def answering(longest: int) -> Problem:
    """The planted masses are what the second written token sees; the first sees every document alike."""
    shards = []
    for shard in planted_shards(6):
        mass = shard.tensors["query.mass"]
        steps = torch.stack([torch.full_like(mass, 0.01), *[mass] * (longest - 1)], dim=1)
        shards.append(with_response(shard, steps, [longest]))
    return problem_of(shards, view="response", response_tokens=longest)


def test_the_response_curve_reads_the_first_written_tokens() -> None:
    rows = response_curve(answering(6))
    assert [row["tokens"] for row in rows] == [1, 2, 4, 6]
    precision = [row["greedy"]["MAP"]["mean"] for row in rows]
    assert precision[0] < 0.8 and precision[1:] == [1.0] * 3
    assert {*rows[0]} == {"tokens", *curves.CURVE_DETECTORS}


def test_the_longest_answer_is_measured_once() -> None:
    assert [row["tokens"] for row in response_curve(answering(4))] == [1, 2, 4]
