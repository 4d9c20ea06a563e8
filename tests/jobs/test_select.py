"""Selection from shards alone: what is measured is measured on samples that nothing was fitted on."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headbank.jobs import detect
from headbank.jobs import select as module
from headbank.jobs.detect import Problem, SelectConfig
from headbank.jobs.select import HeldOut, calibration_error, fold_of, fuse, held_out, intervals, select
from headbank.numerics.evidence import platt
from headbank.types import Aggregation, HeadId, HeadSet
from tests.jobs.shards import QUICK, planted_shards, problem_of, shard_of
from tests.support.planted_masses import PLANTED


def random_problem(n: int, questions: list[int] | None = None, config: SelectConfig = QUICK) -> Problem:
    """Random masses of 2 placements, 2 layers and 2 heads over 4 documents; the first is gold."""
    generator = torch.Generator().manual_seed(0)
    gold = [True, False, False, False]
    return problem_of(
        [
            shard_of(torch.rand((2, 2, 2, 4), generator=generator), gold, question=q, name=str(i))
            for i, q in enumerate(questions or list(range(n)))
        ],
        config=config,
    )


# Folds


@pytest.mark.parametrize(("n", "folds"), [(2, 2), (5, 5), (11, 5), (23, 5)])
def test_folds_are_even_random_and_the_seeds(n: int, folds: int) -> None:
    found = fold_of(range(n), SelectConfig(seed=3))
    sizes = np.bincount(found)
    assert len(sizes) == folds and sizes.max() - sizes.min() <= 1
    assert found.tolist() == fold_of(range(n), SelectConfig(seed=3)).tolist()
    if n > 5:
        assert found.tolist() != fold_of(range(n), SelectConfig(seed=4)).tolist()


def test_samples_of_one_group_share_a_fold() -> None:
    groups = ["a", "b", "a", "c", "d", "c", "e", "f", "a"]
    found = dict.fromkeys(groups, -1)
    folds = fold_of(groups, SelectConfig(folds=3))
    for group, fold in zip(groups, folds.tolist(), strict=True):
        assert found[group] in (-1, fold)
        found[group] = fold
    # Six groups in three folds, two each, however many samples they have.
    assert sorted(found.values()) == [0, 0, 1, 1, 2, 2]


def test_distinct_samples_are_dealt_as_groups_of_one() -> None:
    dealt = np.random.default_rng(7).permutation(9) % 5
    assert fold_of(range(9), SelectConfig(seed=7)).tolist() == dealt.tolist()


@pytest.mark.parametrize("groups", [[], ["a"], ["a", "a", "a"]])
def test_one_question_cannot_be_held_out(groups: list[str]) -> None:
    with pytest.raises(ValueError, match="at least two questions"):
        fold_of(groups, SelectConfig())


def test_one_fold_is_no_cross_validation() -> None:
    with pytest.raises(ValueError, match="two folds"):
        fold_of("ab", SelectConfig(folds=1))


# Cross-validation


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> tuple[list[set[int]], list[int]]:
    """What a detector was fitted on, call by call, and what was ranked; the second must never be in the first."""
    trained: list[set[int]] = []
    ranked: list[int] = []
    fit, rank = detect.DETECTORS["expert"], module._rank

    def spy_fit(problem: Problem, index: torch.Tensor) -> HeadSet:
        trained.append(set(index.tolist()))
        return fit(problem, index)

    def spy_rank(problem: Problem, sample: int, heads: HeadSet) -> Any:
        assert sample not in trained[-1]
        questions = problem.statistics.questions
        assert questions[sample] not in {questions[i] for i in trained[-1]}
        ranked.append(sample)
        return rank(problem, sample, heads)

    monkeypatch.setitem(detect.DETECTORS, "expert", spy_fit)
    monkeypatch.setattr(module, "_rank", spy_rank)
    return trained, ranked


@pytest.mark.parametrize("n", [2, 5, 11])
def test_no_sample_is_ranked_by_heads_that_were_fitted_on_it(
    spy: tuple[list[set[int]], list[int]], n: int
) -> None:
    trained, ranked = spy
    found = held_out(random_problem(n, config=replace(QUICK, folds=5)), "expert")
    assert sorted(ranked) == list(range(n))
    assert len(trained) == min(5, n)
    assert all(len(train) >= n - math.ceil(n / min(5, n)) for train in trained)
    assert [z.shape for z in found.z] == [(2, 4)] * n
    assert {len(v) for metrics in found.values.values() for v in metrics.values()} == {n}


def test_a_question_that_comes_twice_is_held_out_as_a_whole(
    spy: tuple[list[set[int]], list[int]],
) -> None:
    held_out(random_problem(6, questions=[1, 2, 1, 3, 2, 1]), "expert")
    assert sorted(spy[1]) == list(range(6))
    assert len(spy[0]) == 3
    assert sorted(map(len, spy[0])) == [3, 4, 5]


def test_all_that_is_fitted_on_held_out_numbers_uses_the_same_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(7)
    folds = fold_of(problem.statistics.questions, QUICK)
    z = held_out(problem, "expert").z
    seen: list[set[int]] = []
    pooled = module._pooled

    def spy_pooled(problem: Problem, z: Any, samples: Any) -> Any:
        seen.append(set(samples))
        return pooled(problem, z, samples)

    monkeypatch.setattr(module, "_pooled", spy_pooled)
    calibration_error(problem, z)
    for fold, (train, test) in enumerate(zip(seen[::2], seen[1::2], strict=True)):
        assert test == set(np.flatnonzero(folds == fold).tolist())
        assert train == set(range(7)) - test


# What is measured


def test_metrics_of_a_sample_are_the_means_over_its_placements() -> None:
    mass = torch.full((2, 1, 1, 4), 0.01)
    mass[0, 0, 0] = torch.tensor([0.4, 0.3, 0.2, 0.1])  # gold first: AP 1
    mass[1, 0, 0] = torch.tensor([0.2, 0.3, 0.4, 0.1])  # gold third: AP 1/3
    problem = problem_of([shard_of(mass, [True, False, False, False], question=q) for q in (0, 1)])
    found = held_out(problem, "expert")
    assert set(found.values) == {"borda", "rrf", "share", "evidence"}
    for rule in found.values:
        assert found.values[rule]["MAP"] == pytest.approx([(1 + 1 / 3) / 2] * 2)
        assert found.values[rule]["R@2"] == pytest.approx([0.5] * 2)


@pytest.mark.parametrize(
    ("detector", "rules"),
    [
        ("expert", {"borda", "rrf", "share", "evidence"}),
        ("greedy", {"evidence"}),
        ("qr", {"evidence", "calibrated"}),
        ("icr", {"evidence", "calibrated"}),
    ],
)
def test_the_rules_that_are_measured(detector: str, rules: set[str]) -> None:
    assert set(held_out(random_problem(3), detector).values) == rules


def test_calibrated_takes_the_content_free_query_off() -> None:
    # Every head looks at the last document whatever is asked; only the question adds something to the gold.
    null = torch.tensor([0.05, 0.05, 0.05, 0.5]).expand(1, 1, 1, 4)
    mass = null + torch.tensor([0.0, 0.2, 0.0, 0.0])
    gold = [False, True, False, False]
    problem = problem_of([shard_of(mass, gold, null=null, question=q) for q in range(3)])
    found = held_out(problem, "qr").values
    assert found["calibrated"]["MAP"] == [1.0] * 3
    assert found["evidence"]["MAP"] == [0.5] * 3


def heads_with(rule: Aggregation) -> HeadSet:
    return HeadSet("expert.query.joint", "expert", "query", (HeadId(0, 0),), rule)


@pytest.mark.parametrize(
    ("own", "share", "expected"),
    [
        ([0.4, 0.6, 0.5, 0.5], [0.55] * 4, "borda"),  # inside the interval of the set's own rule
        ([0.4, 0.6, 0.5, 0.5], [0.61] * 4, "share"),
        ([0.5] * 4, [0.5] * 4, "borda"),
        ([0.5] * 4, [0.51] * 4, "share"),
        ([0.8] * 4, [0.1] * 4, "borda"),
    ],
)
def test_the_papers_vote_stays_unless_another_is_above_its_interval(
    own: list[float], share: list[float], expected: str
) -> None:
    values: dict[Aggregation, dict[str, list[float]]] = {"borda": {"NDCG@2": own}, "share": {"NDCG@2": share}}
    assert module._best_rule(heads_with("borda"), HeldOut(values, []), SelectConfig()) == expected


def test_the_record_of_a_set_says_how_it_was_measured() -> None:
    problem = problem_of(planted_shards(7), config=replace(QUICK, folds=5))
    found = select(problem, "greedy")
    assert found.head_set.heads == (PLANTED,)
    record = found.head_set.dev_metrics
    assert record["protocol"] == "5-fold cross-validation over questions, mean over placements"
    assert record["samples"] == 7
    assert record["aggregations"] == {"evidence": found.metrics}
    assert found.metrics["MAP"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert (
        select(problem_of(planted_shards(2)), "greedy").head_set.dev_metrics["protocol"].startswith("2-fold")
    )  # type: ignore[attr-defined]


def test_probabilities_are_those_of_held_out_log_odds() -> None:
    problem = problem_of(planted_shards(10))
    found = select(problem, "greedy")
    assert found.head_set.platt is not None
    a, b = found.head_set.platt
    assert a > 0
    z = torch.cat([rows.flatten() for rows in found.held_out.z])
    gold = torch.cat(list(problem.statistics.gold))
    p = platt(z, a, b)
    # Separable: the golds are sure, and the probabilities sum to what there is (the maximum of the likelihood).
    assert float(p[gold].min()) > 0.8 and float(p[~gold].max()) < 0.2
    n, m = int(gold.sum()), int((~gold).sum())
    targets = n * (n + 1) / (n + 2) + m / (m + 2)
    assert float(p.sum()) == pytest.approx(targets, rel=1e-4)
    assert 0 <= found.head_set.dev_metrics["calibration_error"] < 0.1  # type: ignore[operator]


def test_the_calibration_error_of_noise_is_small_and_of_a_broken_scale_is_not() -> None:
    problem = random_problem(40)
    noise = [
        torch.randn((2, 4), generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        for i in range(40)
    ]
    # Nothing can be told, so every document has the base rate of a quarter: honest.
    assert calibration_error(problem, noise) < 0.08
    folds = fold_of(problem.statistics.questions, QUICK)
    gold = problem.statistics.gold[0].double() * 8 - 4
    # What tells golds in the other folds is turned round in this one.
    turned = [(gold if folds[i] else -gold).expand(2, -1) for i in range(40)]
    assert calibration_error(problem, turned) > 0.3


def test_intervals_are_of_every_metric() -> None:
    found = intervals({"MAP": [0.0, 1.0], "R@2": [0.5, 0.5]}, SelectConfig())
    assert found["MAP"] == {"mean": 0.5, "low": 0.0, "high": 1.0}
    assert found["R@2"] == {"mean": 0.5, "low": 0.5, "high": 0.5}


# Fusion


def fused(voter: Any, n: int = 30) -> Any:
    """The fusion of a mediocre head set with a voter that is a function of (gold, noise)."""
    problem = random_problem(n)
    generator = torch.Generator().manual_seed(1)
    gold = problem.statistics.gold
    z = [g.double() + 1.5 * torch.randn((2, 4), generator=generator, dtype=torch.float64) for g in gold]
    scores = [voter(g.double(), torch.randn(4, generator=generator, dtype=torch.float64)) for g in gold]
    return fuse(problem, heads_with("evidence"), z, {"bm25": scores}, ""), z, problem


def test_a_voter_that_says_nothing_has_no_weight() -> None:
    constant, *_ = fused(lambda gold, noise: 0 * noise + 5)
    assert constant.weights[1] == pytest.approx(0, abs=1e-9)
    noise, *_ = fused(lambda gold, noise: noise, n=120)
    assert noise.weights[1] < 0.15 * noise.weights[0]
    wrong, *_ = fused(lambda gold, noise: -gold + noise)
    assert wrong.weights[1] == 0, "a voter is never turned round"
    assert wrong.weights[0] > 0


def test_a_perfect_voter_dominates() -> None:
    fusion, z, problem = fused(lambda gold, noise: 10 * gold + 0.1 * noise)
    assert fusion.weights[1] > 3 * fusion.weights[0]
    assert fusion.dev_metrics["MAP"]["mean"] == 1.0
    alone = intervals(module._metrics(problem, z), QUICK)["MAP"]["mean"]
    assert alone < 0.9
    assert fusion.dev_metrics["calibration_error"] < 0.15


def test_a_fusion_names_its_features_and_how_they_were_standardised() -> None:
    problem = random_problem(6)
    z = [torch.arange(8, dtype=torch.float64).reshape(2, 4) + i for i in range(6)]
    voters = {name: [torch.arange(4, dtype=torch.float64) * k] * 6 for name, k in (("bm25", 2), ("dense", 3))}
    fusion = fuse(problem, heads_with("evidence"), z, voters, "minilm")
    assert (fusion.name, fusion.head_set) == ("fusion.query.joint", "expert.query.joint")
    assert (fusion.voters, fusion.dense_model) == (("bm25", "dense"), "minilm")
    everything = torch.cat([rows.flatten() for rows in z])
    assert fusion.mean == pytest.approx((float(everything.mean()), 3.0, 4.5))
    assert fusion.std == pytest.approx(
        (float(everything.std(correction=0)), 2 * math.sqrt(1.25), 3 * math.sqrt(1.25))
    )
    assert len(fusion.weights) == 3 and fusion.platt[0] >= 0


def test_no_sample_is_fused_by_weights_that_were_fitted_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[set[int]] = []
    fit = module._fit_fusion

    def spy(problem: Problem, features: Any, samples: Any) -> Any:
        trained.append(set(samples))
        return fit(problem, features, samples)

    monkeypatch.setattr(module, "_fit_fusion", spy)
    _, _, problem = fused(lambda gold, noise: noise, n=7)
    folds = fold_of(problem.statistics.questions, QUICK)
    assert trained == [set(range(7)), *(set(np.flatnonzero(folds != f).tolist()) for f in range(3))]
