"""Expert heads: activation, frequency, strength, thresholds, selection, and a planted head to be found."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headbank.numerics.activation import (
    Selection,
    average_precision,
    expert,
    frequency,
    is_activated,
    passes,
    select_experts,
    sensitive,
    strength,
)
from headbank.types import HeadId
from tests.support import oracles

eighths = st.integers(0, 8).map(lambda i: i / 8)


@st.composite
def documents(draw):
    """Means of a few heads with many ties, and a gold mask with both kinds of documents."""
    count = draw(st.integers(2, 6))
    gold = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(lambda g: len(set(g)) == 2))
    means = draw(st.lists(st.lists(eighths, min_size=count, max_size=count), min_size=1, max_size=4))
    return means, gold


@st.composite
def score_maps(draw):
    """f, strength and soft [P, L, H] on a coarse grid, an eligibility mask, a count and thresholds."""
    placements, layers, heads = (draw(st.integers(1, 3)) for _ in range(3))
    size = placements * layers * heads
    maps = [
        np.array(draw(st.lists(eighths, min_size=size, max_size=size))).reshape(placements, layers, heads)
        for _ in range(3)
    ]
    eligible = draw(st.lists(st.booleans(), min_size=layers, max_size=layers).filter(any))
    # Quarters keep the quantile's interpolation exact in binary.
    taus = draw(st.tuples(eighths, st.integers(0, 4).map(lambda i: i / 4)))
    return *maps, eligible, draw(st.integers(1, 7)), *taus


def bools(text: str) -> torch.Tensor:
    return torch.tensor([c == "1" for c in text], dtype=torch.bool)


def test_activation_needs_every_gold_above_every_distractor():
    gold = bools("1010")
    means = torch.tensor(
        [
            [0.4, 0.1, 0.3, 0.2],  # min gold 0.3 > max distractor 0.2
            [0.9, 0.1, 0.2, 0.3],  # one gold is highest, the other (0.2) loses to 0.3
            [0.1, 0.4, 0.2, 0.3],  # both lose
        ]
    )
    assert is_activated(means, gold).tolist() == [True, False, False]


def test_activation_is_strict():
    # min gold = max distractor = 0.25
    assert not is_activated(torch.tensor([0.5, 0.25, 0.25]), bools("110"))
    assert is_activated(torch.tensor([0.5, 0.25, 0.125]), bools("110"))


def test_activation_of_two_documents():
    means = torch.tensor([[0.2, 0.1], [0.1, 0.2], [0.0, 0.0]])
    assert is_activated(means, bools("10")).tolist() == [True, False, False]
    assert is_activated(means, bools("01")).tolist() == [False, True, False]


def test_activation_keeps_leading_dimensions():
    means = torch.tensor([[[0.2, 0.1], [0.1, 0.2]], [[0.3, 0.2], [0.3, 0.0]]])
    assert is_activated(means, bools("10")).tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        (bools("000"), "at least one gold"),
        (bools("111"), "at least one distractor"),
        (bools("10"), "D = 3"),
        (torch.tensor([1, 0, 0]), "gold must be bool"),
    ],
)
def test_activation_rejects_masks(gold, message):
    with pytest.raises(ValueError, match=message):
        is_activated(torch.ones(3), gold)


@pytest.mark.parametrize("documents", [0, 1])
@pytest.mark.parametrize("is_gold", [True, False])
def test_activation_is_undefined_below_two_documents(documents, is_gold):
    with pytest.raises(ValueError, match="at least one"):
        is_activated(torch.ones(4, documents), torch.full((documents,), is_gold))


@pytest.mark.parametrize("function", [is_activated, average_precision])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_activation_and_precision_reject_values_that_are_not_finite(function, bad):
    with pytest.raises(ValueError, match="finite"):
        function(torch.tensor([0.5, 0.1, bad]), bools("100"))


@settings(deadline=None)
@given(documents())
def test_activation_and_precision_equal_the_loops(case):
    means, gold = case
    tensor, mask = torch.tensor(means), torch.tensor(gold)
    assert is_activated(tensor, mask).tolist() == [oracles.is_activated(row, gold) for row in means]
    expected = [oracles.average_precision(row, gold) for row in means]
    assert average_precision(tensor, mask).tolist() == pytest.approx(expected, rel=1e-12)


def test_frequency_is_the_share_of_samples():
    # [N=4, P=1, L=1, H=2]: head 0 on samples 0, 1, 3; head 1 never.
    active = torch.tensor([[1, 0], [1, 0], [0, 0], [1, 0]], dtype=torch.bool).reshape(4, 1, 1, 2)
    f = frequency(active)
    assert f.tolist() == [[[0.75, 0.0]]]
    assert f.dtype == torch.float64


def test_frequency_of_exactly_three_fifths_reaches_tau_f():
    # 3/5 rounds to the same number as 0.6, whatever the number of samples.
    for samples in range(5, 205, 5):
        enough = 3 * samples // 5
        for activated in (enough, enough - 1):
            active = (torch.arange(samples) < activated).reshape(samples, 1, 1, 1)
            assert passes(frequency(active), torch.ones(1, 1, 1)).item() is (activated == enough)


def test_frequency_needs_a_sample():
    with pytest.raises(ValueError, match="at least one sample"):
        frequency(torch.zeros(0, 2, 3, 4, dtype=torch.bool))


def test_strength_averages_over_activated_samples_only():
    # Head 0: activated with 0.5 and 0.25, inactive with 1.0 -> 0.375. Head 1: never -> 0.
    active = torch.tensor([[1, 0], [0, 0], [1, 0]], dtype=torch.bool).reshape(3, 1, 1, 2)
    gold_mean = torch.tensor([[0.5, 0.9], [1.0, 0.9], [0.25, 0.9]]).reshape(3, 1, 1, 2)
    result = strength(active, gold_mean)
    assert result.tolist() == [[[0.375, 0.0]]]
    assert result.dtype == torch.float64


def test_frequency_and_strength_keep_placements_and_heads_apart():
    rng = np.random.default_rng(0)
    active, gold_mean = rng.random((7, 2, 3, 4)) < 0.4, rng.random((7, 2, 3, 4))
    f = frequency(torch.from_numpy(active))
    abar = strength(torch.from_numpy(active), torch.from_numpy(gold_mean))
    for p, layer, h in itertools.product(range(2), range(3), range(4)):
        values = [gold_mean[n, p, layer, h] for n in range(7) if active[n, p, layer, h]]
        assert f[p, layer, h].item() == len(values) / 7
        assert abar[p, layer, h].item() == pytest.approx(sum(values) / len(values) if values else 0.0)


def test_thresholds_are_reached_at_equality():
    # 11 heads with strength 0/16 .. 10/16: the 0.9 quantile is place 0.9 * 10 = 9, the value 9/16 itself.
    abar = torch.arange(11, dtype=torch.float64).reshape(1, 1, 11) / 16
    assert passes(torch.ones(1, 1, 11), abar).flatten().nonzero().flatten().tolist() == [9, 10]
    f = torch.ones(1, 1, 11, dtype=torch.float64)
    f[..., 9], f[..., 10] = 0.6, 0.59
    assert passes(f, abar).flatten().nonzero().flatten().tolist() == [9]


def test_threshold_of_strength_belongs_to_its_placement():
    # Placement 1 is ten times weaker; a common quantile would pass no head there.
    abar = torch.stack([torch.arange(10.0), torch.arange(10.0) / 10]).reshape(2, 1, 10)
    passed = passes(torch.ones(2, 1, 10), abar)
    assert passed.nonzero().tolist() == [[0, 0, 9], [1, 0, 9]]


def test_ineligible_layers_neither_pass_nor_raise_the_threshold():
    abar = torch.tensor([[[0.9, 0.8], [0.2, 0.1]]])
    f = torch.ones(1, 2, 2)
    assert passes(f, abar).nonzero().tolist() == [[0, 0, 0]]
    assert passes(f, abar, eligible=bools("01")).nonzero().tolist() == [[0, 1, 0]]


def test_a_head_that_is_never_activated_does_not_pass():
    # Every strength is 0, so is the quantile, and tau_f = 0 lets every frequency through.
    f = torch.tensor([[[0.0, 0.1]]])
    assert passes(f, torch.zeros(1, 1, 2), tau_f=0.0).tolist() == [[[False, True]]]


@pytest.mark.parametrize("tau_f", [-0.1, 1.1, float("nan")])
def test_thresholds_outside_their_range_are_rejected(tau_f):
    ones = torch.ones(1, 1, 2)
    with pytest.raises(ValueError, match="tau_f and tau_p"):
        passes(ones, ones, tau_f=tau_f)
    with pytest.raises(ValueError, match="tau_f and tau_p"):
        passes(ones, ones, tau_p=tau_f)


def test_selection_rejects_what_it_cannot_judge():
    ones = torch.ones(1, 2, 2)
    with pytest.raises(ValueError, match="eligible layer"):
        passes(ones, ones, eligible=bools("00"))
    with pytest.raises(ValueError, match="placement"):
        passes(ones[:0], ones[:0])
    with pytest.raises(ValueError, match="count"):
        select_experts(ones, ones, ones, count=0)
    for place in range(3):
        maps = [ones.clone() for _ in range(3)]
        maps[place][0, 1, 1] = torch.nan
        with pytest.raises(ValueError, match="finite"):
            select_experts(*maps)


def test_sensitive_is_any_placement_and_expert_is_all():
    # [P=2, L=1, H=4]: all four combinations of passing.
    passed = torch.tensor([[[0, 0, 1, 1]], [[0, 1, 0, 1]]], dtype=torch.bool)
    assert sensitive(passed).tolist() == [[False, True, True, True]]
    assert expert(passed).tolist() == [[False, False, False, True]]


def test_average_precision_by_hand():
    # Ranking: gold, distractor, gold, distractor -> (1/1 + 2/3) / 2 = 5/6.
    # Ranking: distractor, gold, distractor, gold -> (1/2 + 2/4) / 2 = 1/2.
    gold = bools("0110")
    means = torch.tensor([[0.3, 0.4, 0.2, 0.1], [0.4, 0.3, 0.1, 0.2]])
    assert average_precision(means, gold).tolist() == pytest.approx([5 / 6, 1 / 2])


def test_average_precision_breaks_ties_by_input_index():
    # 64 equal documents, the gold at index 40: rank 41.
    gold = torch.arange(64) == 40
    assert average_precision(torch.full((64,), 0.5), gold).item() == pytest.approx(1 / 41)


def test_average_precision_of_golds_alone_is_one():
    assert average_precision(torch.tensor([0.2]), bools("1")).item() == 1.0
    assert average_precision(torch.tensor([0.2, 0.3]), bools("11")).item() == 1.0


def test_average_precision_needs_a_gold():
    with pytest.raises(ValueError, match="at least one gold"):
        average_precision(torch.ones(2), bools("00"))
    with pytest.raises(ValueError, match="at least one gold"):
        average_precision(torch.ones(0), bools(""))


def test_experts_are_ordered_by_worst_frequency_then_strength_then_place():
    # tau_p = 0 passes all strengths. min f: 0.7, 0.8, 0.8, 0.8 -> head 0 last; mean Abar: heads 1 and 3 tie
    # at 0.5, head 2 has 0.6.
    f = torch.tensor([[[1.0, 0.8, 0.9, 0.8]], [[0.7, 1.0, 0.8, 0.9]]])
    abar = torch.tensor([[[0.9, 0.25, 0.5, 0.75]], [[0.9, 0.75, 0.7, 0.25]]])
    chosen = select_experts(f, abar, torch.zeros(2, 1, 4), count=4, tau_p=0.0)
    assert chosen == Selection((HeadId(0, 2), HeadId(0, 1), HeadId(0, 3), HeadId(0, 0)), strict=4)
    assert select_experts(f, abar, torch.zeros(2, 1, 4), count=3, tau_p=0.0) == Selection(chosen.heads[:3], 3)


def test_missing_experts_are_filled_by_worst_precision():
    # Head L1H1 alone passes. The others by min soft: L0H1 0.5 (mean 0.75), L1H0 0.5 (mean 0.5), L0H0 0.25.
    f = torch.zeros(2, 2, 2)
    f[:, 1, 1] = 1.0
    soft = torch.tensor([[[0.25, 0.5], [0.5, 0.0]], [[1.0, 1.0], [0.5, 0.0]]])
    chosen = select_experts(f, f, soft, count=3)
    assert chosen == Selection((HeadId(1, 1), HeadId(0, 1), HeadId(1, 0)), strict=1)
    # Asking for more than there are returns all of them, each once.
    assert select_experts(f, f, soft, count=9) == Selection((*chosen.heads, HeadId(0, 0)), strict=1)
    # A layer that is not eligible does not fill.
    assert select_experts(f, f, soft, count=9, eligible=bools("01")).heads == (HeadId(1, 1), HeadId(1, 0))


@settings(deadline=None)
@given(score_maps())
def test_thresholds_and_selection_equal_the_loops(case):
    f, abar, soft, eligible, count, tau_f, tau_p = case
    tensors = [torch.from_numpy(m) for m in (f, abar, soft)]
    passed = passes(*tensors[:2], tau_f, tau_p, torch.tensor(eligible))
    assert passed.tolist() == oracles.passes(f.tolist(), abar.tolist(), tau_f, tau_p, eligible)
    chosen = select_experts(*tensors, count, tau_f, tau_p, torch.tensor(eligible))
    expected = oracles.select_experts(f.tolist(), abar.tolist(), soft.tolist(), count, tau_f, tau_p, eligible)
    assert (list(chosen.heads), chosen.strict) == expected


def planted():
    """60 samples of 2 golds among 5 documents in 4 placements, 6 layers of 4 heads: f, Abar and soft.

    Attention of every head is noise in [0, 0.1). Head (3, 2) gives the golds 0.3 more wherever they stand.
    Head (1, 0) gives the first two positions 0.5 more: it looks like an expert in placement 0, where the
    golds come first.
    """
    samples, places, layers, heads, count = 60, 4, 6, 4, 5
    rng = np.random.default_rng(7)
    means = torch.from_numpy(0.1 * rng.random((samples, places, layers, heads, count)))
    means[:, :, 1, 0, :2] += 0.5
    active, gold_mean, precision = [], [], []
    for p in range(places):
        gold = (torch.arange(count) == p) | (torch.arange(count) == p + 1)
        means[:, p, 3, 2, gold] += 0.3
        active.append(is_activated(means[:, p], gold))
        gold_mean.append(means[:, p][..., gold].mean(-1))
        precision.append(average_precision(means[:, p], gold))
    stacked = torch.stack(active, dim=1)
    soft = torch.stack(precision, dim=1).mean(0)
    return frequency(stacked), strength(stacked, torch.stack(gold_mean, dim=1)), soft


def test_planted_head_is_the_only_expert():
    f, abar, soft = planted()
    passed = passes(f, abar)
    assert expert(passed).nonzero().tolist() == [[3, 2]]
    # The position head passes where the golds stand first, and nowhere else.
    assert passed[:, 1, 0].tolist() == [True, False, False, False]
    assert sensitive(passed).nonzero().tolist() == [[1, 0], [3, 2]]
    chosen = select_experts(f, abar, soft, count=5)
    assert chosen.strict == 1
    assert chosen.heads[0] == HeadId(3, 2)
    assert len(set(chosen.heads)) == 5
    # In the last placement the position head leaves its golds ranks 3 to 5, by noise: AP is (1/3 + 2/4) / 2,
    # (1/3 + 2/5) / 2 or (1/4 + 2/5) / 2, on average 0.369; noise alone would have ranks 1 to 5.
    worst = soft.amin(0)
    assert worst[1, 0].item() == pytest.approx(0.369, abs=0.02)
    assert worst[1, 0] == worst.min()
    assert HeadId(1, 0) not in chosen.heads


def test_inputs_are_never_written():
    means, gold, eligible = torch.rand(3, 4), bools("0110"), bools("10")
    active, gold_mean = torch.rand(3, 2, 2, 5) > 0.5, torch.rand(3, 2, 2, 5)
    f, abar, soft = torch.rand(2, 2, 5), torch.rand(2, 2, 5), torch.rand(2, 2, 5)
    tensors = (means, gold, eligible, active, gold_mean, f, abar, soft)
    before = [t.clone() for t in tensors]
    is_activated(means, gold)
    average_precision(means, gold)
    frequency(active)
    strength(active, gold_mean)
    passed = passes(f, abar, eligible=eligible)
    sensitive(passed)
    expert(passed)
    select_experts(f, abar, soft, eligible=eligible)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy)
