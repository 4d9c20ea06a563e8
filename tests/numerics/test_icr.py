"""ICR by hand and against loops."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch

from headbank.errors import NonFiniteScore
from headbank.numerics.icr import calibrated, icr_scores
from headbank.types import Span


def icr_by_loops(token_mass, null_mass, spans):
    """[n][T] -> ([D], number of dropped tokens)."""
    scores, dropped = [], 0
    for start, end in spans:
        tokens = [
            sum(row[t] - null[t] for row, null in zip(token_mass, null_mass, strict=True))
            for t in range(start, end)
        ]
        if len(tokens) > 1:
            threshold = statistics.mean(tokens) - 2 * statistics.stdev(tokens)
            dropped += sum(t < threshold for t in tokens)
            tokens = [t for t in tokens if t >= threshold]
        scores.append(sum(tokens))
    return scores, dropped


def test_calibrated_is_the_query_less_the_content_free_query():
    found = calibrated(torch.tensor([0.5, 0.25]), torch.tensor([0.125, 0.5]))
    assert found.tolist() == [0.375, -0.25]
    assert found.dtype == torch.float64


def test_scores_sum_heads_and_tokens():
    token = torch.tensor([[0.5, 0.25, 0.125, 0.0], [0.25, 0.25, 0.0, 0.5]])
    null = torch.tensor([[0.25, 0.0, 0.25, 0.0], [0.0, 0.0, 0.25, 0.25]])
    # Tokens: 0.5, 0.5, -0.375, 0.25. No document is long enough for an outlier.
    scores = icr_scores(token, null, [Span(0, 2), Span(2, 4), Span(3, 4), Span(1, 1)])
    assert scores.tolist() == [1.0, -0.125, 0.25, 0.0]
    assert scores.dtype == torch.float64


def test_a_token_more_than_two_deviations_below_the_mean_is_dropped():
    # A lone outlier among n lies (n - 1) / sqrt(n) deviations off: 2.47 for 8 tokens, 1.79 for 5.
    null = torch.zeros(1, 8)
    low = torch.tensor([[0.1] * 7 + [-10.0]])
    assert icr_scores(low, null, [Span(0, 8)]).item() == pytest.approx(0.7, abs=1e-6)
    assert icr_scores(low, null, [Span(3, 8)]).item() == pytest.approx(0.4 - 10.0, abs=1e-6)
    # Only low tokens are abnormal: a high one is what relevance looks like.
    assert icr_scores(-low, null, [Span(0, 8)]).item() == pytest.approx(10.0 - 0.7, abs=1e-6)


def test_a_document_of_equal_tokens_keeps_them():
    scores = icr_scores(torch.full((3, 12), 0.1), torch.zeros(3, 12), [Span(0, 12), Span(0, 7)])
    assert scores.tolist() == pytest.approx([3.6, 2.1], abs=1e-6)


def test_outliers_are_those_of_the_heads_sum_not_of_each_head():
    # Token 7 is an outlier for head 0 alone; head 1 makes up for it.
    token = torch.tensor([[0.1] * 7 + [-10.0], [0.1] * 7 + [10.3]])
    assert icr_scores(token, torch.zeros(2, 8), [Span(0, 8)]).item() == pytest.approx(1.7, abs=1e-5)


def test_scores_equal_the_loops():
    rng = np.random.default_rng(0)
    dropped = 0
    for _ in range(20):
        token, null = rng.standard_t(3, (2, 4, 60)) ** 2 / 100
        edges = np.sort(rng.integers(0, 61, 6))
        spans = [Span(a, b) for a, b in itertools.pairwise(edges.tolist())]
        expected, gone = icr_by_loops(token.tolist(), null.tolist(), spans)
        found = icr_scores(torch.from_numpy(token), torch.from_numpy(null), spans)
        assert found.tolist() == pytest.approx(expected, abs=1e-12)
        dropped += gone
    assert dropped > 10


def test_no_documents_and_bad_input():
    mass = torch.rand(2, 4)
    assert icr_scores(mass, mass, []).shape == (0,)
    with pytest.raises(ValueError, match="does not lie"):
        icr_scores(mass, mass, [Span(2, 5)])
    with pytest.raises(ValueError, match="one shape"):
        icr_scores(mass, mass[:1], [])
    with pytest.raises(ValueError, match="one head"):
        icr_scores(mass[:0], mass[:0], [])
    for bad in (math.nan, math.inf):
        wrong = mass.clone()
        wrong[1, 3] = bad
        for pair in ((wrong, mass), (mass, wrong)):
            with pytest.raises(NonFiniteScore):
                icr_scores(*pair, [Span(0, 1)])
