"""Evidence scores by hand, against loops, and the property they exist for: other documents don't matter."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from headbank.errors import NonFiniteScore
from headbank.numerics.evidence import (
    MASS_FLOOR,
    combine,
    expected_calibration_error,
    fit_platt,
    flipped_pairs,
    log_odds,
    moments,
    platt,
    standardise,
)


def bools(text):
    return torch.tensor([c == "1" for c in text])


def prompt_masses(reference, documents):
    """Softmax over reference logits and every document's logits, summed by part."""
    parts = [np.exp(p).sum() for p in (reference, *documents)]
    whole = sum(parts)
    return torch.tensor([[p / whole for p in parts[1:]]]), torch.tensor([parts[0] / whole])


def test_log_odds_by_hand():
    mass = torch.tensor([[0.2, 0.1], [0.4, 0.0]], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.0], dtype=torch.float64)
    lengths = torch.tensor([4, 0])
    expected = [
        [math.log(0.2 / 2 / 0.5), math.log(0.1 / 0.5)],  # 4 ** 0.5 = 2; an empty document has length 1
        [math.log(0.4 / 2 / 1e-9), 0.0],  # both floored: log(1e-9 / 1e-9)
    ]
    z = log_odds(mass, reference, lengths, 0.5)
    assert z.dtype == torch.float64
    assert z.tolist() == [pytest.approx(row, abs=1e-12) for row in expected]


def test_log_odds_exponents_0_and_1_are_mass_and_mean():
    mass, reference, lengths = torch.rand(2, 3, 5), torch.rand(2, 3), torch.tensor([1, 2, 3, 4, 5])
    of_mass = (mass.double() / reference.double()[..., None]).log()
    assert torch.allclose(log_odds(mass, reference, lengths, 0.0), of_mass, atol=1e-12)
    assert torch.allclose(log_odds(mass, reference, lengths, 1.0), of_mass - lengths.log(), atol=1e-6)


def test_log_odds_does_not_depend_on_the_other_documents():
    rng = np.random.default_rng(0)
    reference = rng.normal(size=5)
    documents = [rng.normal(size=k) * 3 for k in (4, 7, 2, 9)]
    lengths = torch.tensor([4, 7, 2, 9])
    all_four = log_odds(*prompt_masses(reference, documents), lengths, 1.0)
    alone = log_odds(*prompt_masses(reference, documents[1:2]), lengths[1:2], 1.0)
    assert alone[0, 0].item() == pytest.approx(all_four[0, 1].item(), abs=1e-12)
    # The masses themselves do depend on them.
    assert (
        prompt_masses(reference, documents[1:2])[0][0, 0] > prompt_masses(reference, documents)[0][0, 1] + 0.1
    )


def test_log_odds_rejects_what_it_cannot_mean():
    mass, reference, lengths = torch.rand(2, 3), torch.rand(2), torch.tensor([1, 1, 1])
    assert log_odds(mass, reference, lengths, 0.0).shape == (2, 3)
    with pytest.raises(ValueError, match="exponent"):
        log_odds(mass, reference, lengths, -0.1)
    with pytest.raises(ValueError, match="exponent"):
        log_odds(mass, reference, lengths, math.nan)
    with pytest.raises(ValueError, match="negative"):
        log_odds(-mass, reference, lengths, 0.0)
    with pytest.raises(ValueError, match="negative"):
        log_odds(mass, -reference, lengths, 0.0)
    # Shapes that would broadcast, silently.
    with pytest.raises(ValueError, match="lengths"):
        log_odds(mass, reference, lengths[:1], 0.0)
    with pytest.raises(ValueError, match="reference"):
        log_odds(mass, reference[:1], lengths, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_errors(bad):
    good, wrong = torch.rand(2, 3), torch.rand(2, 3)
    wrong[1, 2] = bad
    lengths, labels = torch.tensor([1, 1, 1]), bools("101")
    for call in (
        lambda: log_odds(wrong, good[:, 0], lengths, 0.0),
        lambda: log_odds(good, wrong[:, 2], lengths, 0.0),
        lambda: moments([good, wrong]),
        lambda: combine(wrong),
        lambda: combine(good, wrong[:, 2]),
        lambda: fit_platt(wrong[1], labels),
        lambda: platt(wrong, 1.0, 0.0),
        lambda: flipped_pairs(wrong[1], [([0, 1, 2], good[0])]),
        lambda: flipped_pairs(good[1], [([0, 1, 2], wrong[1])]),
    ):
        with pytest.raises(NonFiniteScore):
            call()


def test_moments_pool_documents_of_all_samples():
    first, second = torch.tensor([[[1.0, 2.0], [3.0, 3.0]]]), torch.tensor([[[6.0], [3.0]]])
    mean, std = moments([first, second])
    # Head 0: 1, 2, 6 has mean 3 and variance (4 + 1 + 9) / 3. Head 1 is constant.
    assert mean.tolist() == [[3.0, 3.0]]
    assert std.tolist() == [[pytest.approx(math.sqrt(14 / 3)), 1.0]]


def test_standardised_z_has_mean_0_and_deviation_1_and_a_constant_head_is_silent():
    z = torch.randn(2, 3, 50, dtype=torch.float64) * 5 + 7
    z[1, 2] = 0.1
    mean, std = moments([z[..., :20], z[..., 20:]])
    unit = standardise(z, mean, std)
    assert unit[0].mean(-1).abs().max() < 1e-12
    assert unit[0].std(-1, correction=0).tolist() == pytest.approx([1.0] * 3)
    assert unit[1, 2].abs().max() < 1e-12


def test_moments_need_a_document():
    for zs in ([], [torch.zeros(2, 0)]):
        with pytest.raises(ValueError, match="at least one document"):
            moments(zs)


def test_combine_is_the_mean_or_the_weighted_sum():
    z = torch.tensor([[1.0, -2.0], [3.0, 5.0]])
    assert combine(z).tolist() == [2.0, 1.5]
    assert combine(z, torch.tensor([2.0, -0.5])).tolist() == [0.5, -6.5]
    assert combine(torch.zeros(3, 0)).shape == (0,)
    for bad in (torch.zeros(1), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match="n = 2"):
            combine(z, bad)
    with pytest.raises(ValueError, match="at least one head"):
        combine(torch.zeros(0, 2))


def test_combine_does_not_depend_on_the_order_of_heads():
    rng = np.random.default_rng(3)
    z, weights = (torch.from_numpy(rng.normal(size=shape)) for shape in ((50, 6), (50,)))
    # Plain sums do depend on it here.
    assert not torch.equal(z.mean(0), z.flip(0).mean(0))
    assert not torch.equal(weights @ z, weights.flip(0) @ z.flip(0))
    assert torch.equal(combine(z), combine(z.flip(0)))
    assert torch.equal(combine(z, weights), combine(z.flip(0), weights.flip(0)))


@pytest.mark.parametrize("unit, shift", [(1.0, 0.0), (1e-3, 5.0), (1e4, -1e5)])
def test_platt_fit_equals_an_independent_logistic_regression_on_soft_targets(unit, shift):
    rng = np.random.default_rng(1)
    y = rng.random(300) < 0.25
    x = (y + rng.normal(size=300)) * unit + shift
    up, down = (y.sum() + 1) / (y.sum() + 2), 1 / ((~y).sum() + 2)
    target = np.where(y, up, down)
    # A soft target t is the document once as relevant with weight t and once as irrelevant with 1 - t.
    model = LogisticRegression(C=1e12, tol=1e-12, max_iter=10_000)
    model.fit(
        np.r_[x, x][:, None] / unit - shift / unit,
        np.r_[np.ones(300), np.zeros(300)],
        sample_weight=np.r_[target, 1 - target],
    )
    a, b = fit_platt(torch.from_numpy(x), torch.from_numpy(y))
    assert a * unit == pytest.approx(model.coef_[0, 0], rel=1e-4)
    assert a * shift + b == pytest.approx(model.intercept_[0], rel=1e-4)


def test_platt_fit_of_separated_scores_is_finite_and_reaches_the_smoothed_targets():
    # Two values only: the fit can meet both targets, (3 + 1) / (3 + 2) and 1 / (2 + 2).
    scores, labels = torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0]), bools("11100")
    a, b = fit_platt(scores, labels)
    assert platt(scores, a, b).tolist() == pytest.approx([0.8, 0.8, 0.8, 0.25, 0.25], abs=1e-6)


def test_platt_never_turns_the_order_round():
    # Scores fall with relevance, or say nothing: everyone gets the mean target, (2 * 3/4 + 2 * 1/4) / 4 = 1/2.
    for scores in ([0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]):
        a, b = fit_platt(torch.tensor(scores), bools("1100"))
        assert a == 0.0
        assert platt(torch.tensor(scores), a, b).tolist() == pytest.approx([0.5] * 4)


def test_platt_is_the_sigmoid():
    assert platt(torch.tensor([[0.0, 2.0]]), 1.5, -1.0).tolist() == [
        pytest.approx([1 / (1 + math.e), 1 / (1 + math.exp(-2.0))])
    ]
    assert platt(torch.tensor([1e6, -1e6]), 1.0, 0.0).tolist() == [1.0, 0.0]


def test_platt_fit_needs_labels_of_both_kinds():
    for labels in (bools("111"), bools("000"), torch.tensor([1, 0, 1]), bools("10")):
        with pytest.raises(ValueError, match=r"relevant and irrelevant|labels bool"):
            fit_platt(torch.zeros(3), labels)


def ece_by_loops(probability, labels, bins):
    total = 0.0
    for i in range(bins):
        low, high = i / bins, (i + 1) / bins
        inside = [k for k, p in enumerate(probability) if low < p <= high or (i == 0 and p == 0)]
        if inside:
            accuracy = sum(labels[k] for k in inside) / len(inside)
            confidence = sum(probability[k] for k in inside) / len(inside)
            total += len(inside) / len(labels) * abs(accuracy - confidence)
    return total


def test_calibration_error_by_hand_with_edges():
    p, labels = torch.tensor([0.7, 0.65], dtype=torch.float64), bools("10")
    # 0.7 closes the bin (0.6, 0.7], so both share it: |1 - 0.7 + 0 - 0.65| / 2.
    assert expected_calibration_error(p, labels) == pytest.approx(0.175)
    # 0 lies in the first bin with 0.05: |0 - 0 + 1 - 0.05| / 2. And 1 in the last.
    low = torch.tensor([0.0, 0.05], dtype=torch.float64)
    assert expected_calibration_error(low, bools("01")) == pytest.approx(0.475)
    assert expected_calibration_error(torch.tensor([1.0, 0.0]), bools("10")) == 0.0
    assert expected_calibration_error(torch.tensor([0.2, 0.9]), bools("11"), bins=1) == pytest.approx(0.45)


def test_calibration_error_equals_the_loops():
    rng = np.random.default_rng(2)
    for bins in (1, 3, 10, 15):
        p = np.round(rng.random(200), 2)
        labels = rng.random(200) < p**2
        found = expected_calibration_error(torch.from_numpy(p), torch.from_numpy(labels), bins)
        assert found == pytest.approx(ece_by_loops(p.tolist(), labels.tolist(), bins), abs=1e-12)
        assert found > 0.05


def test_calibration_error_rejects_what_is_no_probability():
    good = torch.tensor([0.5, 0.5])
    for bad in (torch.tensor([1.1, 0.5]), torch.tensor([-0.1, 0.5]), torch.tensor([math.nan, 0.5])):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            expected_calibration_error(bad, bools("10"))
    with pytest.raises(ValueError, match="bins"):
        expected_calibration_error(good, bools("10"), bins=0)
    for p, labels in ((good[:0], bools("")), (good, bools("1")), (good, torch.tensor([1, 0]))):
        with pytest.raises(ValueError, match="labels"):
            expected_calibration_error(p, labels)


def test_flipped_pairs_by_hand():
    whole = torch.tensor([4.0, 3.0, 2.0, 1.0])
    same = [([3, 0], torch.tensor([0.0, 9.0])), ([2, 1], torch.tensor([1.0, 2.0]))]
    assert flipped_pairs(whole, same) == 0.0
    # Pooled 4, 1, 2, 1: of six pairs (1, 2) turns round and (1, 3) becomes a tie.
    changed = [([0, 1], torch.tensor([4.0, 1.0])), ([2, 3], torch.tensor([2.0, 1.0]))]
    assert flipped_pairs(whole, changed) == pytest.approx(2 / 6)
    # All reversed; and a tie that stays one is no flip while a tie that breaks is.
    assert flipped_pairs(whole, [([0, 1, 2, 3], -whole)]) == 1.0
    assert flipped_pairs(torch.tensor([1.0, 1.0, 0.0]), [([0, 1, 2], torch.tensor([2.0, 2.0, 3.0]))]) == 2 / 3
    assert flipped_pairs(torch.tensor([1.0, 1.0]), [([0], torch.zeros(1)), ([1], torch.ones(1))]) == 1.0


def test_flipped_pairs_of_fewer_than_two_documents():
    assert flipped_pairs(torch.zeros(0), []) == 0.0
    assert flipped_pairs(torch.zeros(1), [([0], torch.ones(1))]) == 0.0


def test_flipped_pairs_need_a_partition():
    whole = torch.zeros(3)
    for parts in (
        [([0, 1], torch.zeros(2))],  # 2 is missing
        [([0, 1], torch.zeros(2)), ([1, 2], torch.zeros(2))],  # 1 comes twice
        [([0, 1, 3], torch.zeros(3))],  # there is no 3
        [([0, 1, 2], torch.zeros(2))],  # a score is missing
        [([0, 1], torch.zeros(1)), ([2], torch.zeros(2))],  # as many scores, in the wrong parts
    ):
        with pytest.raises(ValueError, match="once"):
            flipped_pairs(whole, parts)


def test_floor_is_below_any_attention_worth_counting():
    assert MASS_FLOOR == 1e-9
    tiny = log_odds(
        torch.tensor([[1e-12, 1e-9]], dtype=torch.float64), torch.ones(1), torch.tensor([1, 1]), 1.0
    )
    assert tiny[0, 0] == tiny[0, 1] == pytest.approx(math.log(1e-9))
