"""Votes by hand, against loops, and the properties a vote must have."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headbank.errors import NonFiniteScore
from headbank.numerics.voting import borda, ranks, rrf, share, vote, vote_order
from headbank.types import VOTES
from tests.support import oracles

RULES = [borda, rrf, share]

# Head 0: document 0 first, 1 and 2 tie. Head 1: 2, 1, 0.
MEANS = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.25, 0.5]])


@st.composite
def votes(draw):
    """[n][D] of eighths: many ties, some heads that see nothing."""
    heads, documents = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 8).map(lambda i: i / 8), min_size=documents, max_size=documents)
    return draw(st.lists(row, min_size=heads, max_size=heads))


def test_borda_by_hand():
    # Head 0 gives 2, 1/2, 1/2 points; head 1 gives 0, 1, 2. Of 2 heads * 2 opponents = 4 points: 2, 3/2, 5/2.
    assert borda(MEANS).tolist() == [0.5, 0.375, 0.625]


def test_rrf_by_hand():
    # Ranks: head 0 gives 1, 2.5, 2.5; head 1 gives 3, 2, 1. The best possible sum is 2/61.
    best = 2 / 61
    expected = [(1 / 61 + 1 / 63) / best, (1 / 62.5 + 1 / 62) / best, (1 / 62.5 + 1 / 61) / best]
    assert rrf(MEANS).tolist() == pytest.approx(expected, rel=1e-14)
    # k = 0: (1 + 1/3) / 2, (2/5 + 1/2) / 2, (2/5 + 1) / 2.
    assert rrf(MEANS, k=0).tolist() == pytest.approx([2 / 3, 0.45, 0.7], rel=1e-14)


def test_share_by_hand():
    # Head 0 sums to 1: 1/2, 1/4, 1/4. Head 1 sums to 7/8: 1/7, 2/7, 4/7.
    expected = [(1 / 2 + 1 / 7) / 2, (1 / 4 + 2 / 7) / 2, (1 / 4 + 4 / 7) / 2]
    assert share(MEANS).tolist() == pytest.approx(expected, rel=1e-14)


def test_share_of_a_head_that_sees_nothing_is_uniform():
    # Head 0 is blind: 1/4 each. Head 1 puts all on document 3.
    means = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.5]])
    assert share(means).tolist() == [0.125, 0.125, 0.125, 0.625]


def test_ranks_break_ties_by_input_index():
    assert ranks(MEANS).tolist() == [[1, 2, 3], [3, 2, 1]]
    assert ranks(torch.full((1, 70), 0.5)).tolist() == [list(range(1, 71))]
    assert ranks(MEANS).dtype == torch.int64


@pytest.mark.parametrize("rule", RULES)
def test_a_document_every_head_puts_first_gets_the_top_score(rule):
    means = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.5, 0.0]])
    assert rule(means)[1].item() == 1.0


@pytest.mark.parametrize("rule", RULES)
def test_scores_of_zero_one_and_two_documents(rule):
    none = rule(torch.zeros(3, 0))
    assert none.shape == (0,)
    assert none.dtype == torch.float64
    assert rule(torch.tensor([[0.25], [0.5]])).tolist() == [1.0]
    assert rule(torch.tensor([[0.0]])).tolist() == [1.0]
    first, second = rule(torch.tensor([[0.75, 0.25]])).tolist()
    # borda 1 and 0; rrf 1 and 61/62; share 3/4 and 1/4
    assert (first, second) == pytest.approx({borda: (1, 0), rrf: (1, 61 / 62), share: (0.75, 0.25)}[rule])


def test_ranks_of_zero_one_and_two_documents():
    assert ranks(torch.zeros(3, 0)).shape == (3, 0)
    assert ranks(torch.zeros(2, 1)).tolist() == [[1], [1]]
    assert ranks(torch.tensor([[0.1, 0.2]])).tolist() == [[2, 1]]


def test_orders_of_zero_and_one_document():
    for name in VOTES:
        assert vote_order(torch.zeros(3, 0), name)[1] == ()
        assert vote_order(torch.zeros(3, 1), name)[1] == (0,)


@settings(deadline=None)
@given(votes())
def test_votes_equal_the_loops(means):
    tensor = torch.tensor(means)
    assert borda(tensor).tolist() == pytest.approx(oracles.borda(means), rel=1e-12)
    assert rrf(tensor).tolist() == pytest.approx(oracles.rrf(means, k=60), rel=1e-12)
    assert rrf(tensor, k=1).tolist() == pytest.approx(oracles.rrf(means, k=1), rel=1e-12)
    assert share(tensor).tolist() == pytest.approx(oracles.share(means), rel=1e-12)
    assert ranks(tensor).tolist() == oracles.ranks(means)


@settings(deadline=None)
@given(votes(), st.randoms(use_true_random=False))
def test_scores_follow_the_documents_and_ignore_the_order_of_heads(means, random):
    tensor = torch.tensor(means, dtype=torch.float64) + 1 / 300  # no longer exact in binary
    heads, documents = list(range(tensor.shape[0])), list(range(tensor.shape[1]))
    random.shuffle(heads)
    random.shuffle(documents)
    for rule in RULES:
        assert rule(tensor[heads][:, documents]).tolist() == rule(tensor)[documents].tolist()


@settings(deadline=None)
@given(votes())
def test_scores_lie_in_their_ranges(means):
    tensor = torch.tensor(means)
    assert share(tensor).sum().item() == pytest.approx(1.0)
    # Each pair of documents shares one point, so Borda's points always sum to D (D - 1) / 2 per head.
    if tensor.shape[1] > 1:
        assert borda(tensor).sum().item() == pytest.approx(tensor.shape[1] / 2)
    for rule in RULES:
        assert bool(((rule(tensor) >= 0) & (rule(tensor) <= 1)).all())


def test_same_votes_from_different_heads_are_an_exact_tie():
    # Head h puts document (h + i) % 7 at rank i + 1, so every document gets every rank once, in another order
    # of heads. Plain sums of 1/61 .. 1/67 in these orders differ in the last bit.
    means = torch.tensor([[1 / (1 + (d - h) % 7) for d in range(7)] for h in range(7)], dtype=torch.float64)
    assert len({sum(1 / (60 + 1 + (d - h) % 7) for h in range(7)) for d in range(7)}) > 1
    for rule in RULES:
        assert len(set(rule(means).tolist())) == 1
    for name in VOTES:
        assert vote_order(means, name)[1] == tuple(range(7))


def test_duplicated_documents_keep_their_input_order():
    rng = np.random.default_rng(3)
    means = torch.from_numpy(np.repeat(rng.random((37, 1)), 53, axis=1))
    for name in VOTES:
        scores, order = vote_order(means, name)
        assert len(set(scores.tolist())) == 1
        assert order == tuple(range(53))


def test_order_breaks_ties_by_share_before_index():
    # Borda gives 1/2 each; the shares are (0.1 + 0.6) / 2 and (0.9 + 0.4) / 2.
    means = torch.tensor([[0.1, 0.9], [0.6, 0.4]])
    scores, order = vote_order(means, "borda")
    assert scores.tolist() == [0.5, 0.5]
    assert order == (1, 0)
    assert vote_order(means.flip(1), "borda")[1] == (0, 1)


@settings(deadline=None)
@given(votes())
def test_order_is_by_score_then_share_then_index(means):
    tensor = torch.tensor(means)
    for name in VOTES:
        scores, order = vote_order(tensor, name)
        assert sorted(order) == list(range(tensor.shape[1]))
        shares = share(tensor)
        for a, b in itertools.pairwise(order):
            assert (scores[a].item(), shares[a].item(), -a) > (scores[b].item(), shares[b].item(), -b)


def test_vote_knows_every_aggregation_by_name():
    assert [vote(MEANS, name).tolist() for name in VOTES] == [rule(MEANS).tolist() for rule in RULES]
    assert [rule.__name__ for rule in RULES] == list(VOTES)


def test_an_unknown_aggregation_is_answered_with_the_choices():
    with pytest.raises(ValueError, match="must be one of: borda, rrf, share") as caught:
        vote(MEANS, "plurality")
    assert "plurality" not in str(caught.value)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("function", [*RULES, ranks])
def test_values_that_are_not_finite_are_errors(function, bad):
    for documents in (1, 3):
        means = torch.full((2, documents), 0.5)
        means[1, documents - 1] = bad
        with pytest.raises(NonFiniteScore):
            function(means)


@pytest.mark.parametrize("function", [*RULES, ranks])
def test_a_vote_needs_heads(function):
    with pytest.raises(ValueError, match="at least one head"):
        function(torch.zeros(0, 3))


def test_share_rejects_negative_attention():
    with pytest.raises(ValueError, match="negative"):
        share(torch.tensor([[0.5, -0.1]]))


def test_transposed_views_vote_like_their_copies():
    means = torch.rand(6, 4).T
    assert not means.is_contiguous()
    for function in (*RULES, ranks):
        assert torch.equal(function(means), function(means.contiguous()))


def test_inputs_are_never_written():
    means = torch.rand(4, 6)
    before = means.clone()
    for function in (*RULES, ranks):
        function(means)
    for name in VOTES:
        vote_order(means, name)
    assert torch.equal(means, before)
