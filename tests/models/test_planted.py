"""The planted model does what it says, so that calibration tests may rely on it."""

from collections import Counter

import pytest

from headbank.models.base import Capture, CaptureRequest
from headbank.types import JOINT, HeadId, PromptLayout, PromptStyle, Sample, View
from tests.support.planted import BIASED, COPIER, PLANTED, planted_runner, planted_samples

BOTH: tuple[View, ...] = ("query", "response")
ALL = tuple(HeadId(layer, head) for layer in range(3) for head in range(4))


def placed(sample: Sample, place: int, style: PromptStyle = JOINT) -> tuple[PromptLayout, list[bool]]:
    """The prompt with the golds as a block before distractor `place`, and which documents are golds."""
    golds = [sample.documents[i] for i in sample.golds]
    others = [sample.documents[i] for i in sample.distractors]
    documents = [*others[:place], *golds, *others[place:]]
    texts = [d.content for d in documents]
    layout = planted_runner()[0].prompts.build(sample.question, texts, style=style)
    return layout, [d.gold for d in documents]


def all_placements(samples: list[Sample]) -> list[tuple[PromptLayout, list[bool]]]:
    """Every sample with its golds before each distractor and after the last."""
    return [placed(s, place) for s in samples for place in range(len(s.distractors) + 1)]


def means(capture: Capture, view: View, head: HeadId, layout: PromptLayout) -> list[float]:
    """Mean attention per document of one head."""
    row = capture.mass[view][capture.heads.index(head)]
    return [float(row[span.start : span.end].mean()) for span in layout.documents]


def test_planted_samples_have_one_or_two_golds_and_no_shared_words() -> None:
    samples = planted_samples(8)
    assert [len(s.golds) for s in samples] == [1, 2] * 4
    assert samples == planted_samples(8)
    assert samples[:2] != planted_samples(2, seed=1)
    assert {len(s.documents) for s in samples} == {5}
    assert {s.golds for s in samples} != {(0,), (0, 1)}
    for sample in samples:
        words = set(sample.question.rstrip("?").split())
        assert len(words) == 2
        assert sample.answer in words
        for document in sample.documents:
            present = words & set(document.text.rstrip(".").split())
            assert present == (words if document.gold else set())


@pytest.mark.parametrize("view", BOTH)
def test_planted_heads_look_where_they_should(view: View) -> None:
    runner, heads = planted_runner()
    assert heads == {"planted": PLANTED, "biased": BIASED, "copier": COPIER}
    cases = all_placements(planted_samples(6))
    first_is_gold = 0
    for layout, gold in cases:
        capture = runner.capture(CaptureRequest(layout, views=(view,)))
        planted = means(capture, view, PLANTED, layout)
        lowest = min(m for m, is_gold in zip(planted, gold, strict=True) if is_gold)
        highest = max(m for m, is_gold in zip(planted, gold, strict=True) if not is_gold)
        assert lowest > 2 * highest
        biased = means(capture, view, BIASED, layout)
        assert biased == sorted(biased, reverse=True)
        assert biased[0] > 1.5 * biased[1]
        first_is_gold += gold[0]
        copier = means(capture, view, COPIER, layout)
        assert max(m for m, is_gold in zip(copier, gold, strict=True) if is_gold) < min(
            m for m, is_gold in zip(copier, gold, strict=True) if not is_gold
        )
        for head in set(capture.heads) - {PLANTED, BIASED, COPIER}:
            uniform = means(capture, view, head, layout)
            assert max(uniform) - min(uniform) < 1e-6 * max(uniform)
    # Distractors stood first in most placements, so the biased head's choice was not the gold's.
    assert first_is_gold == 6 < len(cases)


@pytest.mark.parametrize("view", BOTH)
def test_in_parallel_the_planted_head_finds_golds_and_the_biased_one_no_first_document(view: View) -> None:
    runner, _ = planted_runner()
    for sample in planted_samples(4):
        seen = []
        for place in range(len(sample.distractors) + 1):
            layout, gold = placed(sample, place, PromptStyle("parallel"))
            capture = runner.capture(CaptureRequest(layout, views=(view,), max_new_tokens=4))
            planted = means(capture, view, PLANTED, layout)
            found = [m for m, is_gold in zip(planted, gold, strict=True) if is_gold]
            missed = [m for m, is_gold in zip(planted, gold, strict=True) if not is_gold]
            assert min(found) > 2 * max(missed)
            seen.append(sorted(means(capture, view, BIASED, layout)))
            if view == "response":
                assert runner.decode(capture.response) == sample.answer
        # Wherever it stands, a document is as far away.
        assert max(seen[0]) < 1.3 * min(seen[0])
        assert all(other == pytest.approx(seen[0], rel=1e-4) for other in seen)


def test_the_planted_model_answers_with_the_word_of_the_golds() -> None:
    runner, _ = planted_runner()
    for sample in planted_samples(4):
        layout = runner.prompts.build(sample.question, [d.content for d in sample.documents])
        capture = runner.capture(CaptureRequest(layout, views=("response",), max_new_tokens=4))
        assert runner.decode(capture.response) == sample.answer


def test_the_planted_samples_find_the_planted_head_and_no_other() -> None:
    """The papers' strict test by hand: in every placement, golds above distractors on most samples."""
    runner, _ = planted_runner()
    wins: Counter[tuple[HeadId, int]] = Counter()
    n = 6
    for sample in planted_samples(n):
        for place in range(4):
            layout, gold = placed(sample, place)
            capture = runner.capture(CaptureRequest(layout))
            for head in capture.heads:
                attention = means(capture, "query", head, layout)
                inside = [m for m, is_gold in zip(attention, gold, strict=True) if is_gold]
                outside = [m for m, is_gold in zip(attention, gold, strict=True) if not is_gold]
                wins[head, place] += min(inside) > max(outside)
    experts = [head for head in ALL if all(wins[head, place] >= 0.6 * n for place in range(4))]
    assert experts == [PLANTED]
    assert [wins[PLANTED, place] for place in range(4)] == [n] * 4
    assert [wins[BIASED, place] for place in range(4)] == [n, 0, 0, 0]
