"""Shards: what they hold, when they are made again, and which samples cannot have one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headbank.errors import BankError, NonFiniteScore
from headbank.jobs.capture import (
    AS_GIVEN,
    CaptureConfig,
    all_placements,
    capture_folder,
    capture_samples,
)
from headbank.jobs.placements import placement_order, placement_positions
from headbank.models.base import NULL_QUERY, Capture, CaptureRequest
from headbank.models.fake import FakeRunner
from headbank.models.hf import HFRunner
from headbank.types import JOINT, Document, PromptLayout, PromptStyle, Sample, View
from tests.support.planted import N_HEADS, N_LAYERS, planted_runner, planted_samples

BOTH: tuple[View, ...] = ("query", "response")
PARALLEL = PromptStyle("parallel")
STYLES = [JOINT, PARALLEL, PromptStyle("joint", label=False, query_first=True)]


def runner() -> HFRunner:
    return planted_runner()[0]


def orders(sample: Sample, config: CaptureConfig) -> list[tuple[int, ...]]:
    if config.placements == AS_GIVEN:
        return [tuple(range(len(sample.documents)))]
    places = placement_positions(len(sample.distractors), config.placements)
    return [placement_order(sample, place, config.seed) for place in places]


def prompt(
    sample: Sample, order: Sequence[int], style: PromptStyle, query: str | None = None
) -> PromptLayout:
    texts = [sample.documents[i].content for i in order]
    return runner().prompts.build(query or sample.question, texts, style=style)


def alone(layout: PromptLayout, views: tuple[View, ...] = ("query",), tokens: int = 2) -> Capture:
    return runner().capture(CaptureRequest(layout, views=views, max_new_tokens=tokens))


def close(found: torch.Tensor, expected: list[float] | torch.Tensor, tolerance: float = 1e-6) -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_shards_hold_the_masses_of_single_captures(tmp_path: Path, style: PromptStyle) -> None:
    sample = planted_samples(2)[1]
    assert len(sample.golds) == 2
    placements = 3 if style.layout == "joint" else AS_GIVEN
    config = CaptureConfig(placements, BOTH, style, seed=5, response_tokens=2)
    shard = capture_samples(runner(), [sample], config, tmp_path)[0][0]
    found = {view: shard.attention(view) for view in BOTH}
    for p, order in enumerate(orders(sample, config)):
        layout = prompt(sample, order, style)
        capture = alone(layout, BOTH)
        outside = [*range(layout.prefix_end), *range(layout.tail_start, layout.length)]
        for view in BOTH:
            rows = capture.mass[view].reshape(N_LAYERS, N_HEADS, -1)
            close(found[view].reference[p], rows[..., outside].double().sum(-1))
            for place, index in enumerate(order):
                span = layout.documents[place]
                close(found[view].mass[p, ..., index], rows[..., span.start : span.end].double().sum(-1))
        assert capture.steps is not None
        for step in range(len(capture.steps)):
            rows = capture.steps[step].reshape(N_LAYERS, N_HEADS, -1)
            for place, index in enumerate(order):
                span = layout.documents[place]
                mass = shard.tensors["response.mass"][p, step, ..., index]
                close(mass, rows[..., span.start : span.end].double().sum(-1))
        assert shard.tensors["response.ids"][p].tolist()[: len(capture.response)] == list(capture.response)
    assert shard.gold.tolist() == [document.gold for document in sample.documents]


@pytest.mark.parametrize("style", [JOINT, PARALLEL], ids=str)
def test_shards_hold_every_token_and_the_content_free_query(tmp_path: Path, style: PromptStyle) -> None:
    sample = planted_samples(1)[0]
    placements = 2 if style.layout == "joint" else AS_GIVEN
    config = CaptureConfig(placements, ("query",), style, seed=1)
    shard = capture_samples(runner(), [sample], config, tmp_path)[0][0]
    ends = shard.lengths.cumsum(0).tolist()
    for p, order in enumerate(orders(sample, config)):
        for source, query in (("query", sample.question), ("null", NULL_QUERY)):
            layout = prompt(sample, order, style, query)
            rows = alone(layout).mass["query"].reshape(N_LAYERS, N_HEADS, -1)
            tokens = shard.token_mass(source)[p]  # type: ignore[arg-type]
            for place, index in enumerate(order):
                span = layout.documents[place]
                start = ends[index] - span.length
                assert layout.ids[span.start : span.end] == tuple(
                    shard.token_ids[start : ends[index]].tolist()
                )
                # Half of 1/2048 of the mass is what half precision loses.
                expected = rows[..., span.start : span.end]
                torch.testing.assert_close(tokens[..., start : ends[index]], expected, atol=1e-7, rtol=6e-4)
                if source == "null":
                    close(shard.null.mass[p, ..., index], expected.double().sum(-1))
        assert shard.query_ids.tolist() == list(layout_ids(prompt(sample, order, style)))
    at = (0, [1, 2], [2, 0])
    assert torch.equal(shard.token_mass("query", at), shard.token_mass("query")[at])


def layout_ids(layout: PromptLayout) -> tuple[int, ...]:
    return layout.ids[layout.query.start : layout.query.end]


@pytest.mark.parametrize("style", [JOINT, PARALLEL], ids=str)
def test_prompt_tokens_are_the_farthest_position(tmp_path: Path, style: PromptStyle) -> None:
    sample = planted_samples(1)[0]
    config = CaptureConfig(AS_GIVEN, ("query",), style)
    shard = capture_samples(runner(), [sample], config, tmp_path)[0][0]
    layout = prompt(sample, range(5), style)
    expected = layout.length
    if style.layout == "parallel":
        longest = max(block.length for block in layout.blocks)
        expected = layout.prefix_end + longest + layout.length - layout.tail_start
    assert shard.prompt_tokens == expected


def test_a_shard_is_used_again_and_only_for_the_same_content(tmp_path: Path) -> None:
    first, second = planted_samples(2)
    config = CaptureConfig(2, ("query",))
    changed = [
        replace(first, question="other?"),
        replace(first, documents=first.documents[::-1]),
        replace(first, id="other"),
        replace(first, documents=(replace(first.documents[0], title="T"), *first.documents[1:])),
    ]
    relabelled = tuple(replace(d, gold=not d.gold, relevance=1 - d.relevance) for d in first.documents)
    changed.append(replace(first, documents=relabelled))
    reused: list[bool] = []
    samples = [first, second, first, *changed, replace(first, answer="other", dataset="x")]
    shards, _ = capture_samples(runner(), samples, config, tmp_path, lambda _, was: reused.append(was))
    assert reused == [False, False, True, *[False] * 5, True]
    assert [shard.sample_id for shard in shards] == [sample.id for sample in samples]
    assert len(list(tmp_path.iterdir())) == 7


@pytest.mark.parametrize(
    "change",
    [
        {"placements": 2},
        {"views": ("query",)},
        {"seed": 1},
        {"response_tokens": 3},
        {"style": PARALLEL},
        {"style": PromptStyle(label=False)},
        {"style": PromptStyle(query_first=True)},
    ],
    ids=str,
)
def test_every_setting_of_the_capture_has_a_folder_of_its_own(tmp_path: Path, change: dict[str, Any]) -> None:
    base: dict[str, Any] = {"placements": 3, "views": BOTH, "style": JOINT, "seed": 0, "response_tokens": 2}
    info = runner().info
    a, b = (capture_folder(tmp_path, info, CaptureConfig(**(base | more))) for more in ({}, change))
    assert a != b and a.parent == b.parent == tmp_path / ".captures"
    assert a == capture_folder(tmp_path, info, CaptureConfig(**base))


@pytest.mark.parametrize("field", ["dtype", "template_hash", "norm_hashes", "config_hash"])
def test_every_model_has_a_folder_of_its_own(tmp_path: Path, field: str) -> None:
    config = CaptureConfig(3, BOTH)
    other = replace(runner().info, **{field: ("x",) if field == "norm_hashes" else "x"})
    assert capture_folder(tmp_path, runner().info, config) != capture_folder(tmp_path, other, config)


def test_unusable_samples_are_counted_by_reason(tmp_path: Path) -> None:
    good = planted_samples(1)[0]
    gold = Document("a", gold=True, relevance=1)
    word = good.documents[0].text.split()[0]
    bad = [
        Sample("no-gold", "question", (Document("a"), Document("b"), Document("c"))),
        Sample("all-gold", "question", (gold, gold)),
        Sample("few", "question", (gold, Document("b"))),
        Sample("long", "question", (replace(gold, text=f"{word} " * 100_000), *[Document("b")] * 3)),
    ]
    shards, rejected = capture_samples(runner(), [*bad, good], CaptureConfig(3, ("query",)), tmp_path)
    assert rejected == {
        "no_gold": ["no-gold"],
        "too_few_distractors": ["all-gold", "few"],
        "too_long": ["long"],
    }
    assert [shard.sample_id for shard in shards] == [good.id]
    as_given = CaptureConfig(AS_GIVEN, ("query",), PARALLEL)
    _, rejected = capture_samples(runner(), [*bad, good], as_given, tmp_path / "parallel")
    assert rejected["too_few_distractors"] == ["all-gold"]


def test_a_response_needs_its_room_in_the_context(tmp_path: Path) -> None:
    sample = planted_samples(1)[0]
    room = runner().info.context_tokens - prompt(sample, range(5), JOINT).length
    for tokens, reasons in ((room, {}), (room + 1, {"too_long": [sample.id]})):
        config = CaptureConfig(AS_GIVEN, BOTH, JOINT, response_tokens=tokens)
        found = capture_samples(runner(), [sample], config, tmp_path / str(tokens))
        assert found[1] == reasons


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    config = CaptureConfig(2, ("query",))
    capture_samples(runner(), planted_samples(1), config, tmp_path)
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(BankError, match=shard.name):
        capture_samples(runner(), planted_samples(1), config, tmp_path)


class Spoilt:
    """A runner that puts a value into the attention of the last capture."""

    def __init__(self, value: float) -> None:
        self._runner, self._value = FakeRunner(), value
        self.info, self.prompts = self._runner.info, self._runner.prompts

    def capture_many(self, requests: Sequence[CaptureRequest]) -> list[Capture]:
        captures = self._runner.capture_many(requests)
        rows = captures[-1].mass["query"].clone()
        rows[0, 0] = self._value
        return [*captures[:-1], replace(captures[-1], mass={"query": rows})]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_attention_that_is_not_finite_never_becomes_a_shard(tmp_path: Path, value: float) -> None:
    sample = planted_samples(1)[0]
    with pytest.raises(NonFiniteScore, match=sample.id):
        capture_samples(Spoilt(value), [sample], CaptureConfig(2, ("query",)), tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_all_placements_go_by_the_most_frequent_number_of_distractors() -> None:
    def sample(distractors: int) -> Sample:
        return Sample("s", "q", (Document("g", gold=True, relevance=1), *[Document("d")] * distractors))

    assert all_placements([sample(8), sample(8), sample(6)]) == 9
    assert all_placements([sample(8), sample(6)]) == 9
