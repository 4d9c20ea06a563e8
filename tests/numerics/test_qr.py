"""QRscore by hand, and planted heads."""

import math

import pytest
import torch

from headbank.numerics.panels import select_top
from headbank.numerics.qr import qr_score
from tests.support.planted_masses import PLANTED, POSITION, planted_samples


def test_score_sums_the_calibrated_mass_of_the_golds():
    mass = torch.tensor([[[0.5, 0.25, 0.125], [0.0, 0.5, 0.5]]])
    null = torch.tensor([[[0.25, 0.25, 0.0], [0.25, 0.0, 0.0]]])
    score = qr_score(mass, null, torch.tensor([True, False, True]))
    # Head 0: 0.25 + 0.125. Head 1: -0.25 + 0.5.
    assert score.tolist() == [[0.375, 0.25]]
    assert score.dtype == torch.float64


def test_score_equals_the_loops():
    for sample in planted_samples(5, seed=3):
        mass, null, gold = sample.mass.tolist(), sample.null_mass.tolist(), sample.gold.tolist()
        expected = [
            [
                sum(mass[i][h][d] - null[i][h][d] for d in range(len(gold)) if gold[d])
                for h in range(len(mass[i]))
            ]
            for i in range(len(mass))
        ]
        found = qr_score(sample.mass, sample.null_mass, sample.gold)
        assert found.tolist() == [pytest.approx(row, abs=1e-12) for row in expected]


def test_planted_head_is_first_and_calibration_silences_the_positional_one():
    samples = planted_samples()
    score = torch.stack([qr_score(s.mass, s.null_mass, s.gold) for s in samples]).mean(0)
    assert select_top(score, 1) == (PLANTED,)
    assert score[POSITION].abs() < 0.1 * score[PLANTED]
    # Without the content-free query, attention that is always there would win.
    raw = torch.stack([qr_score(s.mass, torch.zeros_like(s.mass), s.gold) for s in samples]).mean(0)
    assert select_top(raw, 1) == (POSITION,)


def test_samples_without_both_kinds_of_documents_are_errors():
    mass = torch.rand(1, 2, 3)
    for gold in ([False] * 3, [True] * 3):
        with pytest.raises(ValueError, match="at least one gold and at least one distractor"):
            qr_score(mass, mass, torch.tensor(gold))
    for gold in (torch.tensor([True, False]), torch.tensor([1, 0, 0])):
        with pytest.raises(ValueError, match="D = 3"):
            qr_score(mass, mass, gold)
    gold = torch.tensor([True, False, False])
    with pytest.raises(ValueError, match="one shape"):
        qr_score(mass, mass[..., :1], gold)
    with pytest.raises(ValueError, match="finite"):
        qr_score(mass, torch.full_like(mass, math.nan), gold)
