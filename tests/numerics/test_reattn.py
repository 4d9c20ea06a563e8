"""ReAttn's weights by hand, against loops, and what they are for."""

import math

import numpy as np
import pytest
import torch

from headbank.errors import NonFiniteScore
from headbank.numerics.reattn import document_frequency_weights, entropy_weight, reattn_mass
from headbank.numerics.spans import span_mass
from headbank.types import Span

DOCUMENTS = [[7, 8, 7], [7, 9], [7, 8, 10]]
QUERY = [7, 8, 9]
SPANS = [Span(1, 4), Span(5, 7), Span(7, 10)]


def reattn_by_loops(token_mass, spans, documents, query, frequency, entropy):
    """[T] of one head -> [D]."""
    masses = []
    for (start, _), ids in zip(spans, documents, strict=True):
        tokens = []
        for place, token in enumerate(ids):
            weight = 1.0
            if frequency and token in query:
                holders = sum(token in other for other in documents)
                weight = math.log(1 + len(documents) / holders) / math.log(1 + len(documents))
            tokens.append(token_mass[start + place] * weight)
        mass = sum(tokens)
        if entropy and len(tokens) > 1 and mass > 0:
            h = -sum(t / mass * math.log(t / mass) for t in tokens if t > 0)
            mass *= h / math.log(len(tokens))
        masses.append(mass)
    return masses


def test_document_frequency_weights_by_hand():
    # 7 is in all three, 8 in two (the repeat within a document counts once), 9 in one, 10 not in the query.
    all_three, two = math.log(2) / math.log(4), math.log(2.5) / math.log(4)
    weights = document_frequency_weights(DOCUMENTS, QUERY)
    expected = [[all_three, two, all_three], [all_three, 1.0], [all_three, two, 1.0]]
    assert [w.tolist() for w in weights] == [pytest.approx(row) for row in expected]
    assert all_three == 0.5
    assert {w.dtype for w in weights} == {torch.float64}


def test_only_query_tokens_are_weighted():
    assert [w.tolist() for w in document_frequency_weights(DOCUMENTS, [])] == [
        [1.0] * 3,
        [1.0] * 2,
        [1.0] * 3,
    ]
    assert [w.tolist() for w in document_frequency_weights([[7, 7], []], [7])] == [[1.0, 1.0], []]
    assert [w.tolist() for w in document_frequency_weights([[7]], [7])] == [[1.0]]
    assert document_frequency_weights([], [7]) == []


def test_entropy_weight_by_hand():
    attention = torch.tensor([[0.1, 0.1, 0.1], [0.3, 0.0, 0.0], [0.2, 0.1, 0.1], [0.0, 0.0, 0.0]])
    expected = [1.0, 0.0, 1.5 * math.log(2) / math.log(3), 1.0]
    assert entropy_weight(attention).tolist() == pytest.approx(expected, abs=1e-7)
    assert all(entropy_weight(torch.full((length,), 0.1)) <= 1 for length in range(2, 300))


def test_entropy_weight_of_short_documents_is_1():
    assert entropy_weight(torch.tensor([[0.5], [0.0]])).tolist() == [1.0, 1.0]
    assert entropy_weight(torch.zeros(2, 0)).tolist() == [1.0, 1.0]


def test_neither_correction_is_plain_mass():
    mass = torch.rand(4, 12)
    plain = reattn_mass(mass, SPANS, DOCUMENTS, QUERY, frequency=False, entropy=False)
    assert torch.allclose(plain, span_mass(mass, SPANS), atol=1e-15)


@pytest.mark.parametrize("frequency", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_mass_equals_the_loops(frequency, entropy):
    rng = np.random.default_rng(5)
    mass = rng.random((6, 12)) ** 4
    mass[0, 5:7] = 0.0
    found = reattn_mass(torch.from_numpy(mass), SPANS, DOCUMENTS, QUERY, frequency=frequency, entropy=entropy)
    expected = [reattn_by_loops(row, SPANS, DOCUMENTS, QUERY, frequency, entropy) for row in mass.tolist()]
    assert found.tolist() == [pytest.approx(row, abs=1e-12) for row in expected]
    assert found.dtype == torch.float64


def test_entropy_is_that_of_the_frequency_weighted_attention():
    # Document 0 is [7, 11], attended 0.5 and 0.25; 7 is in the query and in both of two documents.
    mass = torch.tensor([[0.5, 0.25, 0.1]], dtype=torch.float64)
    spans, documents = [Span(0, 2), Span(2, 3)], [[7, 11], [7]]
    half = math.log(2) / math.log(3)
    a, b = 0.5 * half, 0.25
    h = -sum(x / (a + b) * math.log2(x / (a + b)) for x in (a, b))
    found = reattn_mass(mass, spans, documents, [7], frequency=True, entropy=True)
    assert found[0].tolist() == pytest.approx([(a + b) * h, 0.1 * half])


def test_common_query_words_and_concentrated_attention_stop_winning():
    # Document 0 repeats a word of the query that all hold, and gets much attention on one place for it.
    documents, spans = [[1, 20, 21], [1, 2, 30], [1, 40, 41]], [Span(0, 3), Span(3, 6), Span(6, 9)]
    mass = torch.tensor([[0.30, 0.0, 0.0, 0.02, 0.13, 0.10, 0.02, 0.01, 0.01]])
    winners = {
        (f, e): reattn_mass(mass, spans, documents, [1, 2], frequency=f, entropy=e).argmax().item()
        for f in (False, True)
        for e in (False, True)
    }
    assert winners == {(False, False): 0, (False, True): 1, (True, False): 1, (True, True): 1}


def test_no_documents_and_bad_input():
    mass = torch.rand(2, 12)
    assert reattn_mass(mass, [], [], QUERY, frequency=True, entropy=True).shape == (2, 0)

    def weighted(attention, spans=SPANS, documents=DOCUMENTS):
        return reattn_mass(attention, spans, documents, QUERY, frequency=True, entropy=True)

    with pytest.raises(ValueError, match="token id"):
        weighted(mass, documents=DOCUMENTS[:2])
    with pytest.raises(ValueError, match="token id"):
        weighted(mass, documents=[[7, 8], [7, 9], [7, 8, 10]])
    with pytest.raises(ValueError, match="does not lie"):
        weighted(mass[:, :9])
    with pytest.raises(ValueError, match="negative"):
        weighted(-mass)
    with pytest.raises(ValueError, match="negative"):
        entropy_weight(torch.tensor([-0.1, 0.2]))
    for bad in (math.nan, math.inf):
        wrong = mass.clone()
        wrong[1, 11] = bad
        with pytest.raises(NonFiniteScore):
            weighted(wrong)
        with pytest.raises(NonFiniteScore):
            entropy_weight(wrong)
