"""The contrastive score by hand, against loops, and planted heads."""

import math

import pytest
import torch

from headbank.numerics.contrastive import contrastive_score
from headbank.numerics.panels import select_top
from headbank.numerics.qr import qr_score
from tests.support.planted_masses import PLANTED, POSITION, planted_samples, row


def contrastive_by_loops(means, gold, temperature):
    """[D] of one head -> its score."""
    total = sum(means)
    weight = [math.exp((m / total if total else 1 / len(means)) / temperature) for m in means]
    distractors = sum(w for w, g in zip(weight, gold, strict=True) if not g)
    shares = [w / (w + distractors) for w, g in zip(weight, gold, strict=True) if g]
    return sum(shares) / len(shares)


def test_score_by_hand():
    # Shares 1/2, 1/4, 1/4; golds 0 and 1 face distractor 2. At temperature 1/4 the logits are 2, 1, 1.
    means = torch.tensor([[[0.2, 0.1, 0.1]]])
    expected = (1 / (1 + math.exp(-1)) + 1 / 2) / 2
    found = contrastive_score(means, torch.tensor([True, True, False]), 0.25)
    assert found.tolist() == [[pytest.approx(expected, rel=1e-6)]]
    assert found.dtype == torch.float64


def test_a_head_without_preference_scores_its_chance():
    gold = torch.tensor([True, False, False, False])
    means = torch.stack([torch.full((4,), 0.2), torch.zeros(4)])[None]
    assert contrastive_score(means, gold, 0.1).tolist() == [pytest.approx([0.25, 0.25])]


def test_score_equals_the_loops():
    for temperature in (0.01, 0.1, 1.0):
        for sample in planted_samples(5, seed=4):
            found = contrastive_score(sample.mass, sample.gold, temperature)
            expected = [
                [contrastive_by_loops(head, sample.gold.tolist(), temperature) for head in layer]
                for layer in sample.mass.tolist()
            ]
            assert found.tolist() == [pytest.approx(head, rel=1e-10) for head in expected]


def test_strength_of_attention_does_not_matter_and_extreme_temperatures_stay_finite():
    sample = planted_samples(1)[0]
    weak = contrastive_score(sample.mass * 1e-6, sample.gold, 0.05)
    assert torch.allclose(weak, contrastive_score(sample.mass, sample.gold, 0.05), rtol=1e-9)
    cold = contrastive_score(sample.mass, sample.gold, 1e-8)
    assert cold[PLANTED] == 1.0
    assert cold.isfinite().all()


def test_planted_head_is_first_and_the_positional_one_is_not_chosen():
    samples = planted_samples()
    score = torch.stack([contrastive_score(s.mass, s.gold, 0.1) for s in samples]).mean(0)
    assert select_top(score, 1) == (PLANTED,)
    # It meets a gold only when one happens to stand there: no better than the heads that see nothing.
    noise = [s for i, s in enumerate(score.flatten().tolist()) if i not in (row(PLANTED), row(POSITION))]
    assert score[POSITION] < max(noise) < 0.25 * score[PLANTED]


def test_a_head_that_floods_every_document_wins_by_mass_but_not_by_contrast():
    samples = planted_samples()
    flood = (2, 0)
    for s in samples:
        s.mass[flood] += 0.5
    qr = torch.stack([qr_score(s.mass, s.null_mass, s.gold) for s in samples]).mean(0)
    contrast = torch.stack([contrastive_score(s.mass, s.gold, 0.1) for s in samples]).mean(0)
    assert select_top(qr, 1) == (flood,)
    assert select_top(contrast, 1) == (PLANTED,)


def test_bad_input():
    means, gold = torch.rand(1, 2, 3), torch.tensor([True, False, False])
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            contrastive_score(means, gold, temperature)
    with pytest.raises(ValueError, match="negative"):
        contrastive_score(-means, gold, 1.0)
    with pytest.raises(ValueError, match="finite"):
        contrastive_score(means * math.inf, gold, 1.0)
    for wrong in (torch.tensor([True] * 3), torch.tensor([False] * 3)):
        with pytest.raises(ValueError, match="at least one gold and at least one distractor"):
            contrastive_score(means, wrong, 1.0)
