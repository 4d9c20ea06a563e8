"""Attention per token to attention per document. Values are eighths, so sums are exact in binary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headbank.numerics.spans import span_mass, span_mean, top_windows
from headbank.types import Span
from tests.support import oracles

eighths = st.integers(0, 8).map(lambda i: i / 8)


@st.composite
def masses_and_spans(draw):
    masses = draw(st.lists(eighths, min_size=0, max_size=12))
    edge = st.integers(0, len(masses))
    pairs = draw(st.lists(st.tuples(edge, edge), max_size=5))
    return masses, [Span(min(p), max(p)) for p in pairs]


def test_mass_sums_half_open_spans():
    # [0,2) = 1/8 + 2/8; [1,3) overlaps it: 2/8 + 3/8; [2,2) is empty; [3,4) is the last token alone.
    token_mass = torch.tensor([1, 2, 3, 4], dtype=torch.float32) / 8
    mass = span_mass(token_mass, [Span(0, 2), Span(1, 3), Span(2, 2), Span(3, 4)])
    assert mass.dtype == torch.float64
    assert mass.tolist() == [0.375, 0.625, 0.0, 0.5]


def test_mass_stops_at_both_edges_of_a_span():
    # The neighbours of the span carry all the attention; inside it there is none.
    token_mass = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])
    assert span_mass(token_mass, [Span(2, 4)]).tolist() == [0.0]
    assert span_mass(token_mass, [Span(1, 4)]).tolist() == [1.0]
    assert span_mass(token_mass, [Span(2, 5)]).tolist() == [1.0]


def test_mass_keeps_leading_dimensions_apart():
    token_mass = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    mass = span_mass(token_mass, [Span(1, 3), Span(0, 1)])
    # Row r holds 4r .. 4r+3: tokens 1 and 2 sum to 8r + 3, token 0 is 4r.
    assert mass.tolist() == [[[3, 0], [11, 4], [19, 8]], [[27, 12], [35, 16], [43, 20]]]


@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_mass_of_no_documents_is_empty(leading):
    mass = span_mass(torch.zeros(*leading, 7), [])
    assert mass.shape == (*leading, 0)
    assert mass.dtype == torch.float64


def test_mass_of_a_late_faint_document_is_accurate():
    # One token takes nearly all attention, as sinks do. After it a float32 running sum no longer moves and a
    # float64 one moves in steps of 2.2e-16, a fiftieth of each token.
    token_mass = torch.full((4096,), 1e-14, dtype=torch.float32)
    token_mass[0] = 1.0
    expected = 1000 * float(token_mass[1])
    assert span_mass(token_mass, [Span(3000, 4000)]).item() == pytest.approx(expected, rel=1e-13, abs=0)


def test_mass_accumulates_in_float64():
    # 2**25 + 1 is no float32: adding 1 to 2**25 there is lost.
    token_mass = torch.tensor([2.0**25, 1.0, 1.0, 1.0])
    assert span_mass(token_mass, [Span(0, 4)]).item() == 2**25 + 3


def test_mass_keeps_a_nan_in_its_own_document():
    token_mass = torch.tensor([0.5, torch.nan, 0.25])
    first, second, third = span_mass(token_mass, [Span(0, 1), Span(1, 2), Span(2, 3)]).tolist()
    assert (first, third) == (0.5, 0.25)
    assert second != second


@pytest.mark.parametrize("span", [Span(-1, 2), Span(0, 5), Span(3, 2), Span(5, 6)])
def test_mass_rejects_spans_outside_the_prompt(span):
    with pytest.raises(ValueError, match="does not lie in the 4 tokens"):
        span_mass(torch.zeros(4), [Span(0, 1), span])


@settings(deadline=None)
@given(masses_and_spans())
def test_mass_equals_the_loop(case):
    masses, spans = case
    assert span_mass(torch.tensor(masses), spans).tolist() == oracles.span_mass(masses, spans)


def test_mean_divides_by_length():
    # Expert Heads, A[l,h,D]: 0.5 over 2 tokens, 0.75 over 3, and an empty document.
    mass = torch.tensor([[0.5, 0.75, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    mean = span_mean(mass, torch.tensor([2, 3, 0]))
    assert mean.tolist() == [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]
    assert mean.dtype == torch.float64


def test_mean_of_an_empty_document_is_zero_whatever_its_mass():
    assert span_mean(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]


def test_mean_of_no_documents_is_empty():
    assert span_mean(torch.zeros(4, 0), torch.zeros(0, dtype=torch.long)).shape == (4, 0)


def test_windows_are_best_first_and_disjoint():
    # Sums of pairs from token 2 on: [2,4) 1+5=6, [3,5) 5+1=6, [4,6) 1+0=1, [5,7) 0+4=4, [6,8) 4+4=8.
    # Best is [6,8); of the two sixes the earlier, [2,4); [3,5) then overlaps; [4,6) is left.
    token_mass = torch.tensor([9.0, 9.0, 1.0, 5.0, 1.0, 0.0, 4.0, 4.0, 9.0])
    span = Span(2, 8)
    assert top_windows(token_mass, span, 2, 1) == [Span(6, 8)]
    assert top_windows(token_mass, span, 2, 5) == [Span(6, 8), Span(2, 4), Span(4, 6)]


def test_windows_run_out_when_no_room_is_left():
    # The best triple of six tokens is the middle one, [2,5): two tokens are left before it and one after.
    token_mass = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    assert top_windows(token_mass, Span(0, 6), 3, 2) == [Span(2, 5)]


def test_windows_may_touch():
    assert top_windows(torch.ones(4), Span(0, 4), 2, 2) == [Span(0, 2), Span(2, 4)]


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (Span(3, 3), []),
        (Span(3, 5), [Span(3, 5)]),
        (Span(3, 6), [Span(3, 6)]),
        (Span(3, 7), [Span(3, 6)]),
    ],
)
def test_windows_of_short_spans(span, expected):
    assert top_windows(torch.ones(10), span, 3, 4) == expected


def test_windows_of_count_zero():
    assert top_windows(torch.ones(10), Span(0, 2), 3, 0) == []


@pytest.mark.parametrize(("width", "count"), [(0, 1), (-1, 1), (1, -1)])
def test_windows_reject_a_width_or_count_that_makes_no_sense(width, count):
    with pytest.raises(ValueError, match="width must be at least 1 and count at least 0"):
        top_windows(torch.ones(3), Span(0, 3), width, count)


def test_windows_reject_a_span_outside_the_prompt():
    with pytest.raises(ValueError, match="does not lie in the 3 tokens"):
        top_windows(torch.ones(3), Span(1, 4), 1, 1)


@settings(deadline=None)
@given(masses_and_spans(), st.integers(1, 4), st.integers(0, 4))
def test_windows_equal_the_loop(case, width, count):
    masses, spans = case
    for span in spans:
        found = top_windows(torch.tensor(masses), span, width, count)
        assert found == oracles.top_windows(masses, span, width, count)


def test_inputs_are_never_written():
    token_mass, mass, lengths = torch.rand(3, 9), torch.rand(3, 2), torch.tensor([2, 0])
    before = [t.clone() for t in (token_mass, mass, lengths)]
    span_mass(token_mass, [Span(0, 4), Span(4, 9)])
    span_mean(mass, lengths)
    top_windows(token_mass[0], Span(1, 9), 2, 3)
    for tensor, copy in zip((token_mass, mass, lengths), before, strict=True):
        assert torch.equal(tensor, copy)
