"""What shards say about heads is what a reranker would read."""

from pathlib import Path

import pytest
import torch

from headbank.jobs.capture import AS_GIVEN, CaptureConfig, capture_samples
from headbank.jobs.detect import Problem, SelectConfig
from headbank.jobs.placements import placement_order, placement_positions
from headbank.jobs.select import select
from headbank.jobs.statistics import activation_of, view_statistics
from headbank.models.base import NULL_QUERY, CaptureRequest
from headbank.numerics.evidence import log_odds
from headbank.rerankers.heads import reading_of
from headbank.rerankers.scoring import Reading
from headbank.types import JOINT, HeadId, PromptStyle, Reweighting, Sample
from tests.jobs.shards import planted_shards, shard_of, with_response
from tests.support.planted import planted_runner, planted_samples
from tests.support.planted_masses import HEADS, LAYERS, PLANTED, POSITION

CHOSEN = (HeadId(1, 2), HeadId(0, 0), HeadId(2, 1))


def live_reading(sample: Sample, order: tuple[int, ...], style: PromptStyle) -> Reading:
    """What the heads give to the documents in their order in the prompt, from a forward pass of its own."""
    runner = planted_runner()[0]
    texts = [sample.documents[i].content for i in order]
    asked, null = (runner.prompts.build(q, texts, style=style) for q in (sample.question, NULL_QUERY))
    rows = [runner.capture(CaptureRequest(layout, CHOSEN)).mass["query"] for layout in (asked, null)]
    return reading_of(asked, rows[0], null, rows[1])


@pytest.mark.parametrize("layout", ["joint", "parallel"])
def test_a_reading_of_a_shard_is_that_of_a_reranker(layout: str, tmp_path: object) -> None:
    style = PromptStyle(layout)  # type: ignore[arg-type]
    sample = planted_samples(2)[1]
    placements = 3 if layout == "joint" else AS_GIVEN
    config = CaptureConfig(placements, ("query",), style, seed=4)
    shards, _ = capture_samples(planted_runner()[0], [sample], config, tmp_path)  # type: ignore[arg-type]
    statistics = view_statistics(shards, "query", style)
    places = placement_positions(len(sample.distractors), 3) if layout == "joint" else [None]
    assert statistics.placements == len(places)
    for p, place in enumerate(places):
        every = tuple(range(len(sample.documents)))
        order = every if place is None else placement_order(sample, place, 4)
        live = live_reading(sample, order, style)
        found = statistics.reading(0, p, CHOSEN, tokens=True)
        assert found.lengths[list(order)].tolist() == live.lengths.tolist()
        torch.testing.assert_close(found.mass[:, list(order)], live.mass.double(), atol=1e-6, rtol=0)
        torch.testing.assert_close(found.reference, live.reference.double(), atol=1e-6, rtol=0)
        for mine, theirs in ((found.token_mass, live.token_mass), (found.null_mass, live.null_mass)):
            assert mine is not None and theirs is not None
            spans = [found.spans()[i] for i in order]
            placed = torch.cat([mine[:, span.start : span.end] for span in spans], dim=1)
            # Half precision of the masses times 1024.
            torch.testing.assert_close(placed, theirs.float(), atol=1e-7, rtol=6e-4)


def test_tokens_are_read_where_they_are_asked_for() -> None:
    statistics = view_statistics(planted_shards(2), "query", JOINT)
    reading = statistics.reading(0, 0, [PLANTED], tokens=False)
    assert (reading.token_mass, reading.null_mass) == (None, None)


def test_log_odds_are_of_every_head_and_computed_once() -> None:
    statistics = view_statistics(planted_shards(3), "query", JOINT)
    assert (statistics.count, statistics.placements, len(statistics.heads)) == (3, 1, LAYERS * HEADS)
    assert statistics.heads[5] == HeadId(1, 1)
    shard = statistics.shards[1]
    reference = torch.full((LAYERS * HEADS,), 0.1)
    expected = log_odds(shard.tensors["query.mass"][0].flatten(0, 1), reference, shard.lengths, 0.5)
    torch.testing.assert_close(statistics.log_odds(0.5)[1][0], expected)
    assert statistics.log_odds(0.5) is statistics.log_odds(0.5)
    assert statistics.log_odds(0.5) is not statistics.log_odds(1.0)


def test_questions_tell_samples_of_one_question() -> None:
    mass = torch.full((1, 1, 1, 2), 0.1)
    shards = [shard_of(mass, [True, False], question=q, name=str(i)) for i, q in enumerate((3, 4, 3))]
    a, b, c = view_statistics(shards, "query", JOINT).questions
    assert a == c == (7, 3) and b == (7, 4)


def test_activation_is_the_papers_by_hand() -> None:
    mass = torch.zeros(2, 1, 2, 3)
    # The first document has two tokens, so that its mean is half of that.
    mass[0, 0, 0] = torch.tensor([0.6, 0.4, 0.3])  # a gold that ties with the distractor is not above it
    mass[1, 0, 0] = torch.tensor([0.8, 0.35, 0.3])
    mass[0, 0, 1] = torch.tensor([0.2, 0.2, 0.8])
    mass[1, 0, 1] = torch.tensor([0.9, 0.1, 0.3])
    statistics = view_statistics([shard_of(mass, [True, True, False], lengths=[2, 1, 1])], "query", JOINT)
    found = activation_of(statistics)
    assert found.active.shape == (1, 2, 1, 2)
    assert found.active[0, :, 0].tolist() == [[False, False], [True, False]]
    assert found.gold_mean[0, :, 0].flatten().tolist() == pytest.approx([0.35, 0.15, 0.375, 0.275])
    ties_by_index, last_two, one_each = 1.0, (1 / 2 + 2 / 3) / 2, (1 + 2 / 3) / 2
    assert found.precision[0, :, 0].flatten().tolist() == pytest.approx(
        [ties_by_index, last_two, 1.0, one_each]
    )
    part = found.of(torch.tensor([0, 0]))
    assert part.active.shape == (2, 2, 1, 2)
    assert torch.equal(part.precision[1], found.precision[0])


def test_the_biased_head_is_activated_only_where_the_gold_is_first() -> None:
    mass = planted_shards(1)[0].tensors["query.mass"][..., :6]
    mass[0, *PLANTED] = torch.tensor([0.1, 0.9, 0.1, 0.1, 0.1, 0.1])
    shards = [shard_of(mass, [i == gold for i in range(6)], question=gold) for gold in (0, 1, 5)]
    active = activation_of(view_statistics(shards, "query", JOINT)).active[:, 0]
    assert active[:, *POSITION].tolist() == [True, False, False]
    assert active[:, *PLANTED].tolist() == [False, True, False]


def test_the_response_view_reads_the_first_written_tokens() -> None:
    steps = torch.arange(12, dtype=torch.float32).reshape(2, 3, 1, 1, 2) / 100
    shard = with_response(shard_of(torch.full((2, 1, 1, 2), 0.1), [True, False]), steps, [3, 2])
    whole, first = (view_statistics([shard], "response", JOINT, n).mass[0] for n in (None, 1))
    # Placement 0 wrote three tokens, placement 1 two; the third row of placement 1 is padding.
    assert whole[:, 0, 0].flatten().tolist() == pytest.approx([0.02, 0.03, 0.07, 0.08])
    assert first[:, 0, 0].flatten().tolist() == pytest.approx([0.0, 0.01, 0.06, 0.07])
    two = view_statistics([shard], "response", JOINT, 2)
    assert two.mass[0][:, 0, 0].flatten().tolist() == pytest.approx([0.01, 0.02, 0.07, 0.08])
    assert two.reference[0].flatten().tolist() == pytest.approx([0.1, 0.1])


def test_statistics_need_a_sample() -> None:
    with pytest.raises(ValueError, match="no usable"):
        view_statistics([], "query", JOINT)


@pytest.mark.parametrize("how", [("frequency",), ("entropy",), ("frequency", "entropy")])
def test_reweighted_statistics_are_what_a_reranker_makes_of_the_tokens(
    how: tuple[Reweighting, ...], tmp_path: Path
) -> None:
    style = PromptStyle("parallel")
    samples = planted_samples(4)
    config = CaptureConfig(AS_GIVEN, ("query",), style)
    shards, _ = capture_samples(planted_runner()[0], samples, config, tmp_path)
    plain, statistics = (view_statistics(shards, "query", style, None, way) for way in ((), how))
    assert not torch.allclose(statistics.mass[1].double(), plain.mass[1].double(), rtol=0.01)
    order = tuple(range(len(samples[1].documents)))
    live = live_reading(samples[1], order, style).reweighted(how)
    found = statistics.reading(1, 0, CHOSEN, tokens=False)
    # Tokens are kept to 0.05 %.
    torch.testing.assert_close(found.mass, live.mass, atol=1e-7, rtol=1e-3)
    # A second time changes nothing: the mass is always made of the tokens.
    torch.testing.assert_close(found.reweighted(how).mass, found.mass, atol=1e-9, rtol=0)
    eligible = torch.ones(plain.mass[0].shape[1], dtype=torch.bool)
    chosen = select(Problem(statistics, SelectConfig(folds=2, exponents=(1.0,)), eligible), "expert").head_set
    assert chosen.reweighting == how
