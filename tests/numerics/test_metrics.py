"""Retrieval metrics by hand and against loops; intervals and p-values where the answer is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headbank.numerics.metrics import (
    bootstrap_interval,
    mean_with_interval,
    paired_p_value,
    rank_metrics,
    rank_metrics_many,
)
from tests.support import oracles


@st.composite
def rankings(draw):
    """A partial or whole order of a few documents with grades 0 to 3."""
    relevance = draw(st.lists(st.integers(0, 3), max_size=7))
    order = draw(st.permutations(range(len(relevance))))
    return order[: draw(st.integers(0, len(relevance)))], relevance


def test_metrics_by_hand():
    # Ranking: distractor, gold, gold, distractor; k = 2.
    # P = 1/2; R = 1/2; MRR = 1/2; MAP = (1/2 + 2/3) / 2 = 7/12.
    # DCG = 1/log2(3), ideal = 1/log2(2) + 1/log2(3).
    dcg, ideal = 1 / math.log2(3), 1 + 1 / math.log2(3)
    metrics = rank_metrics([3, 0, 2, 1], [1, 0, 1, 0])
    assert metrics == pytest.approx(
        {"P@2": 1 / 2, "NDCG@2": dcg / ideal, "MAP": 7 / 12, "MRR": 1 / 2, "R@2": 1 / 2}
    )
    assert list(metrics) == ["P@2", "NDCG@2", "MAP", "MRR", "R@2"]


def test_ndcg_gain_is_the_grade():
    # Grades in ranked order 1, 3: DCG = 1 + 3/log2(3); ideal 3 + 1/log2(3). Exponential gains differ.
    log3 = math.log2(3)
    assert rank_metrics([0, 1], [1, 3])["NDCG@2"] == pytest.approx((1 + 3 / log3) / (3 + 1 / log3))


def test_a_perfect_ranking_scores_one():
    assert set(rank_metrics([1, 3, 0, 2], [0, 1, 0, 1]).values()) == {1.0}


def test_k_stands_in_the_names_and_cuts():
    metrics = rank_metrics([0, 1, 2], [0, 0, 1], k=3)
    assert metrics["P@3"] == pytest.approx(1 / 3)
    assert metrics["NDCG@3"] == pytest.approx(1 / 2)  # 1/log2(4)
    assert metrics["R@3"] == 1.0
    assert rank_metrics([0, 1, 2], [0, 0, 1], k=1)["R@1"] == 0.0


def test_precision_divides_by_k_when_documents_are_fewer():
    assert rank_metrics([0], [1])["P@2"] == 0.5
    assert rank_metrics([0], [1])["R@2"] == 1.0


def test_documents_left_out_of_the_order_are_misses():
    # Two golds, one returned, at rank 1: MAP = 1/2.
    assert rank_metrics([2], [1, 0, 1])["MAP"] == 0.5


@pytest.mark.parametrize(("order", "relevance"), [([], []), ([0], [0]), ([1, 0], [0, 0]), ([], [1, 1])])
def test_nothing_relevant_returned_scores_zero(order, relevance):
    assert rank_metrics(order, relevance) == {"P@2": 0.0, "NDCG@2": 0.0, "MAP": 0.0, "MRR": 0.0, "R@2": 0.0}


def test_long_orders_are_kept_exactly():
    # trec_eval reorders ties by name, and "9" sorts after "10": every rank must survive.
    for place in (0, 9, 10, 99, 1999):
        order = list(range(2000))
        relevance = [int(i == place) for i in order]
        assert rank_metrics(order, relevance)["MRR"] == pytest.approx(1 / (place + 1), rel=1e-12)


@settings(deadline=None)
@given(st.lists(rankings(), max_size=12), st.integers(1, 4))
def test_metrics_equal_the_loops(cases, k):
    # Over ten queries, so that query names "10" and "2" must not be mixed up.
    rows = rank_metrics_many([order for order, _ in cases], [relevance for _, relevance in cases], k)
    assert len(rows) == len(cases)
    for row, (order, relevance) in zip(rows, cases, strict=True):
        assert row == pytest.approx(oracles.rank_metrics(order, relevance, k), rel=1e-9)
        assert row == rank_metrics(order, relevance, k)


@pytest.mark.parametrize("order", [[0, 0], [2], [-1], [0, 1, 1]])
def test_orders_that_name_no_document_are_rejected(order):
    with pytest.raises(ValueError, match="order of query 1 must be distinct indices of its 2 documents"):
        rank_metrics_many([[0], order], [[1], [1, 0]])


def test_arguments_that_do_not_fit_are_rejected():
    with pytest.raises(ValueError, match="k must be at least 1"):
        rank_metrics([0], [1], k=0)
    with pytest.raises(ValueError, match="zip"):
        rank_metrics_many([[0], [0]], [[1]])


def test_metrics_never_write_their_inputs():
    order, relevance = [1, 0], [0, 1]
    rank_metrics_many([order], [relevance])
    assert (order, relevance) == ([1, 0], [0, 1])


def test_interval_of_a_fair_coin():
    # 200 values 0/1: the mean's standard error is 0.5 / sqrt(200) = 0.0354, so 95 % is 0.5 +- 0.0693.
    low, high = bootstrap_interval([0.0, 1.0] * 100)
    assert low == pytest.approx(0.5 - 0.0693, abs=0.008)
    assert high == pytest.approx(0.5 + 0.0693, abs=0.008)


def test_interval_agrees_with_scipy():
    values = np.random.default_rng(5).exponential(size=80)
    reference = stats.bootstrap(
        (values,),
        np.mean,
        confidence_level=0.8,
        n_resamples=9000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    low, high = bootstrap_interval(values, confidence=0.8, resamples=9000)
    assert (low, high) == pytest.approx((reference.low, reference.high), abs=0.01)


def test_interval_depends_on_the_seed_alone():
    values = [0.1, 0.9, 0.4, 0.7]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(np.array(values), seed=3)
    assert bootstrap_interval(list(range(50)), seed=3) != bootstrap_interval(list(range(50)), seed=4)


def test_interval_widens_with_confidence():
    values = list(range(30))
    low, high = bootstrap_interval(values, confidence=0.5)
    wide_low, wide_high = bootstrap_interval(values, confidence=0.99)
    assert wide_low < low < 14.5 < high < wide_high


@pytest.mark.parametrize("values", [[0.1], [0.1, 0.1, 0.1], [0.0] * 9])
def test_interval_of_equal_values_is_the_value(values):
    # The mean of three 0.1 is 0.10000000000000002; the interval is 0.1.
    assert bootstrap_interval(values) == (values[0], values[0])


@pytest.mark.parametrize("values", [[], [0.5, math.nan], [0.5, math.inf]])
def test_interval_and_p_value_reject_what_they_cannot_judge(values):
    with pytest.raises(ValueError, match="at least one value is needed and all must be finite"):
        bootstrap_interval(values)
    with pytest.raises(ValueError, match="at least one value is needed and all must be finite"):
        paired_p_value([0.5] * len(values), values)


def test_p_value_by_hand():
    # Four equal differences: only + + + + and - - - - of the 16 sign patterns are as extreme.
    assert paired_p_value([2, 3, 4, 5], [1, 2, 3, 4]) == pytest.approx(2 / 16)
    # Differences 1 and -1: all of the sums 0, 2, -2, 0 are at least as far from 0 as the observed 0.
    assert paired_p_value([1, 0], [0, 1]) == 1.0
    assert paired_p_value([1], [0]) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_p_value_equals_the_enumeration(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 9, size=9), rng.integers(0, 6, size=9)
    expected = oracles.sign_flip_p_value((a - b).tolist())
    assert paired_p_value(a, b) == pytest.approx(expected)
    assert paired_p_value(b, a) == pytest.approx(expected)


def test_p_value_of_equal_inputs_is_one():
    assert paired_p_value([0.3] * 40, [0.3] * 40) == 1.0


def test_p_value_of_many_pairs_is_sampled():
    # A shift of 10 standard errors is never reached by a sign pattern: 2 * 1 / (10000 + 1) is the least that
    # sampling can give. Noise alone is not significant.
    noise = np.random.default_rng(0).normal(size=200)
    noise -= noise.mean()
    zeros = np.zeros(200)
    shift = 10 * noise.std() / math.sqrt(200)
    assert paired_p_value(noise + shift, zeros) == pytest.approx(2 / 10001)
    assert paired_p_value(noise, zeros) > 0.9
    assert paired_p_value(noise + shift / 5, zeros, seed=1) == pytest.approx(
        0.0455, abs=0.01
    )  # 2 standard errors
    assert paired_p_value(noise + shift / 5, zeros, seed=1) == paired_p_value(
        noise + shift / 5, zeros, seed=1
    )


def test_p_value_needs_pairs():
    with pytest.raises(ValueError, match="equal lengths, got 3 and 2"):
        paired_p_value([1, 2, 3], [1, 2])


def test_the_mean_stands_beside_its_interval() -> None:
    values = [0.0, 1.0, 1.0, 0.5]
    low, high = bootstrap_interval(values, seed=3)
    assert mean_with_interval(values, seed=3) == {"mean": 0.625, "low": low, "high": high}
    assert low < 0.625 < high
