"""Every detector on masses in which one head finds the golds and another one looks at the first document."""

import math
from dataclasses import replace

import pytest
import torch

from headbank.jobs.detect import DETECTORS, Problem
from headbank.types import JOINT, HeadId, HeadSet
from tests.jobs.shards import QUICK, planted_shards, problem_of, shard_of, with_response
from tests.support.planted_masses import HEADS, LAYERS, PLANTED, POSITION


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(planted_shards(20))


def detect(problem: Problem, name: str) -> HeadSet:
    return DETECTORS[name](problem, torch.arange(problem.statistics.count))


@pytest.mark.parametrize("name", ["expert", "greedy", "contrastive", "qr"])
def test_the_planted_head_comes_first_and_the_biased_one_does_not_vote(problem: Problem, name: str) -> None:
    found = detect(problem, name)
    assert found.heads[0] == PLANTED
    assert POSITION not in found.heads
    assert (found.name, found.detector, found.view, found.style) == (
        f"{name}.query.joint",
        name,
        "query",
        JOINT,
    )


def test_the_planted_head_is_the_only_expert_and_the_only_one_greedy_needs(problem: Problem) -> None:
    experts = detect(problem, "expert")
    assert (experts.strict_experts, len(experts.heads)) == (1, QUICK.count)
    assert detect(problem, "greedy").heads == (PLANTED,)
    assert len(detect(problem, "qr").heads) == len(detect(problem, "contrastive").heads) == QUICK.panel


def test_the_planted_head_has_the_largest_weight_and_the_biased_one_hardly_any(problem: Problem) -> None:
    found = detect(problem, "weighted")
    assert len(found.heads) == len(set(found.heads)) == LAYERS * HEADS
    weights = dict(zip(found.heads, found.weights, strict=True))
    assert found.heads[0] == PLANTED and weights[PLANTED] > 0
    assert abs(weights[POSITION]) < 0.25 * weights[PLANTED]
    assert [abs(w) for w in found.weights] == sorted((abs(w) for w in found.weights), reverse=True)


def test_icr_selects_nothing(problem: Problem) -> None:
    found = detect(problem, "icr")
    assert found.heads == tuple(HeadId(layer, head) for layer in range(LAYERS) for head in range(HEADS))
    assert (found.default_aggregation, found.exponent) == ("calibrated", 1.0)


@pytest.mark.parametrize("name", DETECTORS)
def test_only_eligible_layers_vote(name: str) -> None:
    allowed = [layer != PLANTED.layer for layer in range(LAYERS)]
    found = detect(problem_of(planted_shards(6), layers=allowed), name)
    assert {head.layer for head in found.heads} <= {0, 2}


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_sees_the_samples_it_is_given_and_no_others(name: str) -> None:
    shards = planted_shards(8)
    # The samples that are left out say the opposite: the golds get least.
    spoilt = [
        shard_of(1 - s.tensors["query.mass"], s.gold.tolist(), question=9 + i)
        for i, s in enumerate(planted_shards(4, seed=5))
    ]
    alone = DETECTORS[name](problem_of(shards), torch.arange(8))
    together = DETECTORS[name](problem_of([*shards, *spoilt]), torch.arange(8))
    assert together == alone


def test_the_moments_are_those_of_every_document_in_every_placement() -> None:
    generator = torch.Generator().manual_seed(3)
    shards = [shard_of(torch.rand((2, 1, 2, d), generator=generator), [True] + [False] * (d - 1), question=d)
              for d in (3, 5)]  # fmt: skip
    found = detect(problem_of(shards, config=replace(QUICK, count=2, exponents=(0.5,))), "expert")
    for i, head in enumerate(found.heads):
        values = [
            math.log(float(s.tensors["query.mass"][p, 0, head.head, d])) - 0.5 * math.log(4) - math.log(0.1)
            for s in shards
            for p in range(2)
            for d in range(len(s.gold))
        ]
        mean = math.fsum(values) / len(values)
        assert len(values) == 16
        assert found.z_mean[i] == pytest.approx(mean, abs=1e-5)
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        assert found.z_std[i] == pytest.approx(deviation, abs=1e-5)


@pytest.mark.parametrize(
    ("gold", "distractor", "expected"),
    [
        # (mass, tokens): the gold wins from e = 0.21 on, always, and up to e = 0.58.
        ((0.3, 2), (0.4, 8), 0.5),
        ((0.4, 4), (0.3, 4), 0.0),
        ((0.3, 8), (0.2, 4), 0.0),
        ((0.1, 1), (0.4, 8), 1.0),
    ],
)
def test_the_exponent_is_the_one_that_ranks_best_and_the_smallest_of_equals(
    gold: tuple[float, int], distractor: tuple[float, int], expected: float
) -> None:
    mass = torch.tensor([distractor[0], gold[0]]).expand(1, 1, 1, 2)
    lengths = [distractor[1], gold[1]]
    shards = [shard_of(mass, [False, True], lengths=lengths, question=i) for i in range(3)]
    config = replace(QUICK, count=1, exponents=(0.0, 0.5, 1.0))
    assert detect(problem_of(shards, config=config), "expert").exponent == expected


def test_the_response_view_has_no_content_free_counterpart() -> None:
    shards = planted_shards(6)
    answered = [with_response(s, s.tensors["query.mass"][:, None], [1]) for s in shards]
    problem = problem_of(answered, view="response", response_tokens=4)
    for name in ("qr", "contrastive", "icr"):
        found = detect(problem, name)
        assert (found.default_aggregation, found.response_tokens) == ("evidence", 4)
    assert detect(problem, "expert").default_aggregation == "borda"
