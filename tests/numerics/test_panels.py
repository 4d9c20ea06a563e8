"""Panels: planted voters must be found, positional ones left out, and fits must be the minima they claim."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from headbank.numerics.evidence import combine, log_odds, moments, standardise
from headbank.numerics.panels import choose_strength, fit_weights, greedy_panel, select_top
from headbank.types import HeadId
from tests.support import oracles
from tests.support.planted_masses import PLANTED, POSITION, planted_samples, row

LOSSES = ["pointwise", "listwise"]


def planted_features(count=40, seed=0):
    """Standardised evidence [L * H, D_i] and golds of the planted samples."""
    samples = planted_samples(count, seed)
    zs = [
        log_odds(s.mass, torch.full(s.mass.shape[:2], 0.1), torch.ones(len(s.gold)), 0.0).flatten(0, 1)
        for s in samples
    ]
    return [standardise(z, *moments(zs)) for z in zs], [s.gold for s in samples]


def noisy_samples(count, signal, seed=0):
    """Features [F, D_i] where row k sees the golds with strength signal[k], under unit noise."""
    rng = np.random.default_rng(seed)
    features, golds = [], []
    for _ in range(count):
        documents = int(rng.integers(5, 9))
        gold = np.zeros(documents, dtype=bool)
        gold[rng.permutation(documents)[: rng.integers(1, 4)]] = True
        features.append(torch.from_numpy(rng.normal(size=(len(signal), documents)) + np.outer(signal, gold)))
        golds.append(torch.from_numpy(gold))
    return features, golds


def greedy_by_loops(features, golds, count):
    """Lists [N][F][D_i] -> row numbers."""

    def precision(panel):
        values = []
        for rows, gold in zip(features, golds, strict=True):
            votes = [sum(rows[k][i] for k in panel) for i in range(len(gold))]
            values.append(oracles.average_precision(votes, gold))
        return sum(values) / len(values)

    panel, best = [], -1.0
    while len(panel) < count:
        tried = [(precision([*panel, k]), k) for k in range(len(features[0])) if k not in panel]
        if not tried or max(tried)[0] <= best + 1e-12:
            break
        best = max(tried)[0]
        panel.append(next(k for value, k in tried if value >= best - 1e-12))
    return panel


def objective_by_loops(weights, features, golds, strength, loss):
    """What `fit_weights` minimises, for lists."""
    total = sum(w * w for w in weights) / 2
    for rows, gold in zip(features, golds, strict=True):
        documents = range(len(gold))
        centred = [[x - sum(r) / len(r) for x in r] for r in rows]
        s = [sum(w * r[i] for w, r in zip(weights, centred, strict=True)) for i in documents]
        good, bad = [i for i in documents if gold[i]], [i for i in documents if not gold[i]]
        if loss == "pointwise":
            of_golds = sum(math.log1p(math.exp(-s[i])) for i in good) / len(good)
            of_others = sum(math.log1p(math.exp(s[i])) for i in bad) / len(bad)
            total += strength * (of_golds + of_others) / 2
        else:
            others = sum(math.exp(s[i]) for i in bad)
            losses = [-math.log(math.exp(s[i]) / (math.exp(s[i]) + others)) for i in good]
            total += strength * sum(losses) / len(losses)
    return total


def slopes(weights, features, golds, strength, loss, step=1e-5):
    """The objective's gradient by central differences."""
    lists = [f.tolist() for f in features], [g.tolist() for g in golds]
    found = []
    for k in range(len(weights)):
        up, down = list(weights), list(weights)
        up[k] += step
        down[k] -= step
        above, below = (objective_by_loops(w, *lists, strength, loss) for w in (up, down))
        found.append((above - below) / (2 * step))
    return found


@st.composite
def panels(draw):
    """Coarse features with many ties, few samples, a count."""
    rows, count = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    features, golds = [], []
    for _ in range(draw(st.integers(1, 4))):
        documents = draw(st.integers(2, 5))
        gold = draw(
            st.lists(st.booleans(), min_size=documents, max_size=documents).filter(lambda g: len(set(g)) == 2)
        )
        one = st.lists(st.integers(-4, 4).map(lambda i: i / 4), min_size=documents, max_size=documents)
        features.append(draw(st.lists(one, min_size=rows, max_size=rows)))
        golds.append(gold)
    return features, golds, count


def test_select_top_orders_by_score_then_head():
    scores = torch.tensor([[0.1, 0.5, 0.5], [0.9, 0.5, 0.2]])
    assert select_top(scores, 4) == (HeadId(1, 0), HeadId(0, 1), HeadId(0, 2), HeadId(1, 1))
    assert select_top(scores, 9)[-2:] == (HeadId(1, 2), HeadId(0, 0))
    assert select_top(scores, 2, torch.tensor([True, False])) == (HeadId(0, 1), HeadId(0, 2))
    assert len(select_top(scores, 9, torch.tensor([True, False]))) == 3
    assert all(isinstance(h, HeadId) for h in select_top(scores, 2))


def test_select_top_rejects_bad_input():
    scores = torch.rand(2, 3)
    with pytest.raises(ValueError, match="count"):
        select_top(scores, 0)
    for eligible in (torch.tensor([False, False]), torch.tensor([True])):
        with pytest.raises(ValueError, match="eligible"):
            select_top(scores, 1, eligible)
    with pytest.raises(ValueError, match="finite"):
        select_top(scores * math.nan, 1)


def test_greedy_finds_the_planted_head_and_stops_when_it_ranks_all():
    features, golds = planted_features()
    assert greedy_panel(features, golds, 8) == (row(PLANTED),)


def test_greedy_leaves_a_positional_voter_out_where_weak_ones_are_all_there_is():
    weak, golds = noisy_samples(60, [0.8, 0.8, 0.8], seed=1)
    positional = [torch.zeros(1, len(g), dtype=torch.float64) for g in golds]
    for one in positional:
        one[0, 0] = 3.0
    features = [torch.cat(pair) for pair in zip(positional, weak, strict=True)]
    assert sorted(greedy_panel(features, golds, 4)) == [1, 2, 3]


def test_greedy_takes_voters_that_complete_each_other():
    # Row 0 sees the first gold, row 2 the second, row 1 sees both a little and a distractor as much.
    features = [torch.tensor([[0.0, 9.0, 0.0, 1.0], [2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 9.0, 1.0]])] * 3
    golds = [torch.tensor([False, True, True, False])] * 3
    # Alone row 1 ranks 0, 1, 2, 3: AP (1/2 + 2/3) / 2 = 7/12. Row 0: 1, 3, 0, 2: (1 + 1/2) / 2 = 3/4.
    # Row 2: 2, 3, 0, 1 likewise 3/4, and comes later. Rows 0 and 1: 11, 2, 2, 1: golds 1 and 3, (1 + 2/3) / 2 = 5/6.
    # Rows 0 and 2: 9, 9 against 2: all.
    assert greedy_panel(features, golds, 8) == (0, 2)
    assert greedy_panel(features, golds, 1) == (0,)


def test_greedy_takes_no_voter_twice():
    # Precision 1/2 and 1/2 with row 0 or row 1 alone, 1/2 and 1 with both; row 0 at double weight would rank all.
    # Row 2 is against the gold.
    features = [
        torch.tensor([[2.0, 2.5, 0.0], [1.0, -1.0, 3.5], [-9.0, 0.0, 0.0]]),
        torch.tensor([[2.0, 2.3, 0.0], [1.0, 0.0, 1.2], [-9.0, 0.0, 0.0]]),
    ]
    golds = [torch.tensor([True, False, False])] * 2
    assert greedy_panel(features, golds, 8) == (0, 1)


@settings(deadline=None, max_examples=60)
@given(panels())
def test_greedy_equals_the_loops(case):
    features, golds, count = case
    found = greedy_panel([torch.tensor(f) for f in features], [torch.tensor(g) for g in golds], count)
    assert list(found) == greedy_by_loops(features, golds, count)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("nonnegative", [False, True])
def test_the_planted_head_has_the_largest_weight_and_the_positional_one_hardly_any(loss, nonnegative):
    features, golds = planted_features()
    weights = fit_weights(features, golds, strength=1.0, loss=loss, nonnegative=nonnegative)
    assert weights.dtype == torch.float64
    assert weights.argmax() == row(PLANTED)
    assert weights[row(POSITION)].abs() < 0.15 * weights[row(PLANTED)]
    # And the weighted vote ranks samples it was not fitted on.
    held_out, held_golds = planted_features(seed=9)
    for f, g in zip(held_out, held_golds, strict=True):
        assert oracles.average_precision(combine(f, weights).tolist(), g.tolist()) == 1.0


@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_are_the_minimum_of_the_documented_objective(loss, strength):
    features, golds = noisy_samples(12, [1.0, 0.0, -0.5, 0.3])
    weights = fit_weights(features, golds, strength=strength, loss=loss)
    assert slopes(weights.tolist(), features, golds, strength, loss) == pytest.approx([0.0] * 4, abs=1e-5)
    assert weights.abs().max() > 1e-3


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_that_may_not_be_negative_are_the_minimum_among_those(loss):
    features, golds = noisy_samples(12, [1.0, 0.0, -0.5, 0.3])
    free = fit_weights(features, golds, strength=1.0, loss=loss)
    assert free.min() < -0.1
    weights = fit_weights(features, golds, strength=1.0, loss=loss, nonnegative=True).tolist()
    for weight, slope in zip(weights, slopes(weights, features, golds, 1.0, loss), strict=True):
        assert weight >= 0
        assert slope == pytest.approx(0.0, abs=1e-5) if weight > 0 else slope > -1e-5
    assert weights[2] == 0.0


@pytest.mark.parametrize("strength", [0.05, 2.0])
def test_pointwise_weights_equal_an_independent_logistic_regression(strength):
    features, golds = noisy_samples(30, [1.0, 0.0, -0.5, 0.3], seed=1)
    x = np.concatenate([(f - f.mean(1, keepdim=True)).T.numpy() for f in features])
    y = np.concatenate([g.numpy() for g in golds])
    share = np.concatenate([np.where(g, 0.5 / g.sum(), 0.5 / (~g).sum()) for g in (g.numpy() for g in golds)])
    model = LogisticRegression(C=strength, fit_intercept=False, tol=1e-10, max_iter=10_000)
    model.fit(x, y, sample_weight=share)
    found = fit_weights(features, golds, strength=strength, loss="pointwise")
    assert found.tolist() == pytest.approx(model.coef_[0].tolist(), abs=1e-5)


def test_listwise_weights_of_pairs_equal_a_logistic_regression_on_differences():
    rng = np.random.default_rng(2)
    good, bad = rng.normal(size=(2, 40, 3)) + np.array([[[0.7, 0.0, -0.4]], [[0.0, 0.0, 0.0]]])
    features = [torch.from_numpy(np.stack([b, g], axis=1)) for g, b in zip(good, bad, strict=True)]
    golds = [torch.tensor([False, True])] * 40
    model = LogisticRegression(C=0.5, fit_intercept=False, tol=1e-10, max_iter=10_000)
    # Each pair once in either direction, at half weight: scikit-learn needs two classes.
    model.fit(np.r_[good - bad, bad - good], np.r_[np.ones(40), np.zeros(40)], sample_weight=np.full(80, 0.5))
    found = fit_weights(features, golds, strength=0.5, loss="listwise")
    assert found.tolist() == pytest.approx(model.coef_[0].tolist(), abs=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_only_the_order_within_a_sample_matters(loss):
    features, golds = noisy_samples(10, [1.0, 0.2])
    shifted = [f + torch.randn(2, 1, dtype=torch.float64) * 100 for f in features]
    weights = fit_weights(features, golds, strength=1.0, loss=loss)
    assert torch.allclose(fit_weights(shifted, golds, strength=1.0, loss=loss), weights, atol=1e-6)


def test_every_sample_counts_the_same_however_many_documents_it_has():
    features, golds = noisy_samples(10, [1.0, 0.2])
    weights = fit_weights(features, golds, strength=1.0, loss="pointwise")
    many = [features[0].repeat(1, 5), *features[1:]], [golds[0].repeat(5), *golds[1:]]
    assert torch.allclose(fit_weights(*many, strength=1.0, loss="pointwise"), weights, atol=1e-6)
    # A sample given twice does count twice.
    twice = [features[0], *features], [golds[0], *golds]
    assert not torch.allclose(fit_weights(*twice, strength=1.0, loss="pointwise"), weights, atol=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_fit_is_deterministic_and_writes_nothing(loss):
    features, golds = noisy_samples(10, [1.0, 0.2])
    before = [f.clone() for f in features]
    first = fit_weights(features, golds, strength=1.0, loss=loss)
    assert torch.equal(first, fit_weights(features, golds, strength=1.0, loss=loss))
    assert greedy_panel(features, golds, 2) == greedy_panel(features, golds, 2)
    assert all(torch.equal(a, b) for a, b in zip(features, before, strict=True))


def test_a_lexical_voter_joins_as_one_more_row():
    heads, golds = noisy_samples(60, [0.6, 0.6], seed=3)
    rng = np.random.default_rng(4)
    lexical = [torch.from_numpy(rng.normal(size=(1, len(g)))) + g for g in golds]
    fused = [torch.cat([h, x * 20]) for h, x in zip(heads, lexical, strict=True)]

    def precision(rows):
        weights = fit_weights(rows[:30], golds[:30], strength=1.0, loss="listwise")
        scores = [combine(f, weights).tolist() for f in rows[30:]]
        return np.mean(
            [oracles.average_precision(s, g.tolist()) for s, g in zip(scores, golds[30:], strict=True)]
        )

    assert precision(fused) > precision(heads) + 0.05


@pytest.mark.parametrize("loss", LOSSES)
def test_noise_asks_for_a_small_strength_and_signal_does_not_mind(loss):
    # Few samples, many useless rows: trusting the samples overfits.
    features, golds = noisy_samples(24, [0.7] * 4 + [0.0] * 60, seed=5)
    choose = {"folds": 4, "seed": 0, "loss": loss}
    strengths = [100.0, 1e-3]
    assert choose_strength(features, golds, strengths, **choose)[0] == 1e-3
    assert choose_strength(features, golds, [100.0], **choose)[0] == 100.0
    # One perfect row: all strengths rank perfectly and the smallest wins, in any order given.
    perfect = [g[None].to(torch.float64) for g in golds]
    for order in itertools.permutations([0.1, 1.0, 10.0]):
        assert choose_strength(perfect, golds, order, **choose)[0] == 0.1


def test_choose_strength_is_the_best_of_cross_validation():
    features, golds = noisy_samples(10, [0.8, 0.0, 0.0], seed=6)
    strengths, folds, seed = [0.01, 0.3, 10.0], 3, 7
    shuffled = np.random.default_rng(seed).permutation(10).tolist()
    means = []
    for strength in strengths:
        values = []
        for fold in range(folds):
            test = shuffled[fold::folds]
            train = [i for i in range(10) if i not in test]
            weights = fit_weights(
                [features[i] for i in train], [golds[i] for i in train], strength=strength, loss="listwise"
            )
            values += [
                oracles.average_precision((weights @ features[i]).tolist(), golds[i].tolist()) for i in test
            ]
        means.append(sum(values) / len(values))
    assert len({round(m, 9) for m in means}) > 1
    chosen, _ = choose_strength(features, golds, strengths, folds=folds, seed=seed, loss="listwise")
    assert chosen == strengths[means.index(max(means))]


def test_bad_samples_are_errors_everywhere():
    features, golds = noisy_samples(4, [1.0, 0.2])
    cases = {
        "at least one sample": ([], []),
        "each with its gold": (features, golds[:3]),
        "one F": ([*features[:3], features[3][:1]], golds),
        "F of at least 1": ([f[:0] for f in features], golds),
        "at least one gold": (features, [*golds[:3], torch.zeros_like(golds[3])]),
        "at least one distractor": (features, [*golds[:3], torch.ones_like(golds[3])]),
        "gold must be bool": (features, [*golds[:3], golds[3].long()]),
        "D = ": (features, [*golds[:3], golds[3][1:]]),
        "finite": ([*features[:3], features[3] * math.nan], golds),
    }
    for message, (x, g) in cases.items():
        with pytest.raises(ValueError, match=message):
            greedy_panel(x, g, 2)
        with pytest.raises(ValueError, match=message):
            fit_weights(x, g, strength=1.0, loss="pointwise")


def test_bad_options_are_errors():
    features, golds = noisy_samples(4, [1.0, 0.2])
    with pytest.raises(ValueError, match="count"):
        greedy_panel(features, golds, 0)
    for strength in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="strength"):
            fit_weights(features, golds, strength=strength, loss="pointwise")
    with pytest.raises(ValueError, match="one of: pointwise, listwise"):
        fit_weights(features, golds, strength=1.0, loss="hinge")
    for folds in (1, 5):
        with pytest.raises(ValueError, match="folds"):
            choose_strength(features, golds, [1.0], folds=folds, seed=0, loss="pointwise")
    with pytest.raises(ValueError, match="at least one strength"):
        choose_strength(features, golds, [], folds=2, seed=0, loss="pointwise")
