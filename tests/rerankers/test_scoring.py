"""From readings to scores, and from the readings of windows to one: against plain loops."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from headbank.errors import BankError, NonFiniteScore
from headbank.numerics.icr import icr_scores
from headbank.rerankers.scoring import Reading, evidence, merge, score
from headbank.types import AGGREGATIONS, VOTES, Aggregation, HeadId, HeadSet, Span
from tests.rerankers.helpers import VOTERS, evidence_by_hand, fitted, sigmoid
from tests.support import oracles


def random_reading(seed: int, lengths: Sequence[int], n: int = len(VOTERS)) -> Reading:
    """Attention of n heads on documents of the given lengths, with its content-free counterpart."""
    generator = torch.Generator().manual_seed(seed)
    tokens, null = torch.rand(2, n, sum(lengths), generator=generator, dtype=torch.float64) / 50
    reading = Reading(
        mass=torch.empty(0),
        reference=torch.rand(n, generator=generator, dtype=torch.float64) + 0.1,
        lengths=torch.tensor(lengths),
        token_mass=tokens,
        null_mass=null,
    )
    mass = [oracles.span_mass(row.tolist(), reading.spans()) for row in tokens]
    return Reading(torch.tensor(mass, dtype=torch.float64), reading.reference, reading.lengths, tokens, null)


@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
@pytest.mark.parametrize("voters", [VOTERS, VOTERS[1:3], VOTERS[:1]], ids=len)
def test_evidence_equals_its_definition(voters: tuple[HeadId, ...], weighted: bool) -> None:
    heads = fitted(weighted=weighted)
    reading = random_reading(3, [4, 0, 9, 1], len(voters))
    masses = reading.mass.tolist()
    expected = evidence_by_hand(masses, reading.reference.tolist(), [4, 0, 9, 1], heads, voters)
    assert evidence(heads, reading, voters).tolist() == pytest.approx(expected, abs=1e-12)
    found = score(heads, reading, voters)
    assert found.scores == pytest.approx([sigmoid(z, 1.5, -0.25) for z in expected], abs=1e-12)
    assert found.order == tuple(oracles.by_score(expected))
    assert found.raw is not None
    assert found.raw.tolist() == pytest.approx(expected, abs=1e-12)


def test_the_order_is_that_of_z_where_probabilities_are_rounded_to_one() -> None:
    heads = HeadSet("a.query.joint", "a", "query", VOTERS[:1], "evidence", z_mean=(0.0,), z_std=(1e-3,))
    mass = torch.tensor([[0.2, 0.3, 0.25]], dtype=torch.float64)
    reading = Reading(mass, torch.tensor([0.01], dtype=torch.float64), torch.tensor([1, 1, 1]))
    found = score(heads, reading, VOTERS[:1])
    assert found.scores == (1.0, 1.0, 1.0)
    assert found.order == (1, 2, 0)


def test_without_a_fitted_scale_the_probability_is_the_sigmoid_of_z() -> None:
    found = score(fitted(platt=None), random_reading(0, [3, 5]), VOTERS)
    assert found.raw is not None
    assert found.scores == pytest.approx([sigmoid(z) for z in found.raw.tolist()], abs=1e-15)


def test_evidence_that_was_not_fitted_is_named() -> None:
    heads = fitted(z_mean=(), z_std=(), default_aggregation="borda")
    with pytest.raises(BankError, match=r"expert\.query\.joint: evidence was not fitted"):
        score(heads, random_reading(0, [3, 5]), VOTERS, "evidence")


@pytest.mark.parametrize("rule", VOTES)
def test_votes_take_means_over_document_tokens(rule: Aggregation) -> None:
    reading = random_reading(5, [7, 0, 2, 2])
    means = [
        [m / n if n else 0.0 for m, n in zip(row, [7, 0, 2, 2], strict=True)] for row in reading.mass.tolist()
    ]
    expected = {"borda": oracles.borda, "share": oracles.share, "rrf": lambda m: oracles.rrf(m, 60)}[rule]
    found = score(fitted(), reading, VOTERS, rule)
    assert found.scores == pytest.approx(expected(means), abs=1e-12)
    assert found.raw is None
    assert found.order[-1] == 1


def test_calibrated_is_icr_on_the_token_masses() -> None:
    reading = random_reading(6, [7, 0, 12])
    assert reading.token_mass is not None
    assert reading.null_mass is not None
    expected = icr_scores(reading.token_mass, reading.null_mass, [Span(0, 7), Span(7, 7), Span(7, 19)])
    found = score(fitted(), reading, VOTERS, "calibrated")
    assert found.scores == tuple(expected.tolist())
    assert found.order == tuple(oracles.by_score(expected.tolist()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_attention_that_is_not_finite_is_refused(rule: Aggregation, bad: float) -> None:
    reading = random_reading(1, [3, 2])
    assert reading.token_mass is not None
    reading.mass[2, 1] = bad
    reading.token_mass[2, 4] = bad
    with pytest.raises(NonFiniteScore):
        score(fitted(), reading, VOTERS, rule)


@pytest.mark.parametrize("null", [True, False], ids=["null", "no null"])
def test_merged_windows_are_means_of_odds(null: bool) -> None:
    chance = random.Random(4)
    lengths = [3, 0, 5, 2, 4, 1]
    parts = []
    for turn, window in enumerate((range(3, 6), range(1, 5), range(3))):
        reading = random_reading(turn, [lengths[i] for i in window])
        reading.reference[:] = torch.tensor([chance.uniform(0.1, 0.9) for _ in VOTERS])
        if not null:
            reading = Reading(reading.mass, reading.reference, reading.lengths, reading.token_mass)
        parts.append((window, reading))
    merged = merge(parts)
    assert merged.lengths.tolist() == lengths
    assert merged.reference.tolist() == [1.0] * len(VOTERS)
    for name, total in (("token_mass", merged.token_mass), ("null_mass", merged.null_mass)):
        if name == "null_mass" and not null:
            assert total is None
            continue
        assert total is not None
        expected: list[list[float]] = [[] for _ in VOTERS]
        for document, length in enumerate(lengths):
            for head in range(len(VOTERS)):
                for token in range(length):
                    odds = []
                    for window, reading in parts:
                        if document in window:
                            begin = sum(lengths[i] for i in window if i < document)
                            value = getattr(reading, name)[head][begin + token].item()
                            odds.append(value / reading.reference[head].item())
                    expected[head].append(sum(odds) / len(odds))
        assert total.shape == (len(VOTERS), sum(lengths))
        for head in range(len(VOTERS)):
            assert total[head].tolist() == pytest.approx(expected[head], rel=1e-12)
            if name == "token_mass":
                by_document = oracles.span_mass(expected[head], merged.spans())
                assert merged.mass[head].tolist() == pytest.approx(by_document, rel=1e-12)


def test_a_window_whose_prefix_and_tail_got_nothing_does_not_break_the_others() -> None:
    blind, seeing = random_reading(0, [2, 3]), random_reading(1, [3, 4])
    assert blind.token_mass is not None
    blind.token_mass[:] = 0
    blind.reference[:] = 0
    merged = merge([(range(1, 3), seeing), (range(2), blind)])
    assert bool(merged.mass.isfinite().all())
    assert merged.mass[:, 0].tolist() == [0.0] * len(VOTERS)
    assert merged.mass[0, 2].item() == pytest.approx(
        (seeing.mass[0, 1] / seeing.reference[0]).item(), rel=1e-12
    )


def test_reweighted_sets_rank_by_reweighted_mass() -> None:
    # Two documents, token 7 is the query's and in both: its weight is log 2 / log 3. Token 8 is in one only.
    weight = math.log(2) / math.log(3)
    token_mass = torch.tensor([[0.2, 0.1, 0.1, 0.3]], dtype=torch.float64)
    reading = Reading(
        mass=torch.tensor([[0.3, 0.4]], dtype=torch.float64),
        reference=torch.tensor([0.3], dtype=torch.float64),
        lengths=torch.tensor([2, 2]),
        token_mass=token_mass,
        token_ids=(8, 7, 9, 7),
        query_ids=(7, 8),
    )
    heads = HeadSet(
        "expert.query.joint",
        "expert",
        "query",
        (HeadId(0, 0),),
        "evidence",
        exponent=0.0,
        z_mean=(0.0,),
        z_std=(1.0,),
        reweighting=("frequency",),
    )
    z = evidence(heads, reading, heads.heads)
    expected = [math.log((0.2 + 0.1 * weight) / 0.3), math.log((0.1 + 0.3 * weight) / 0.3)]
    assert z.tolist() == pytest.approx(expected, abs=1e-12)
    # Votes see the same masses.
    assert score(heads, reading, heads.heads, "borda").order == (1, 0)
    strong = replace(reading, token_mass=torch.tensor([[0.25, 0.1, 0.05, 0.32]], dtype=torch.float64))
    assert score(replace(heads, reweighting=()), strong, heads.heads, "borda").order == (1, 0)
    assert score(heads, strong, heads.heads, "borda").order == (0, 1)
