"""Packing changes no number: neither mates, nor the size of passes, nor padding, nor what was shared."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from headbank.models import packed, tap
from headbank.models.base import CaptureRequest
from headbank.models.hf import HFRunner
from headbank.types import HeadId, PromptStyle
from tests.support.captures import (
    BOTH,
    DOCUMENTS,
    TOLERANCE,
    assert_same,
    mixed_requests,
    prompt,
    small_passes,
)
from tests.support.reference import BARE, PARALLEL, STYLES
from tests.support.tiny_models import FAMILIES, Work, tiny_runner

DOUBLE = torch.float64


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_among_mates_equals_the_request_alone(family: str, dtype: torch.dtype) -> None:
    runner = tiny_runner(family, dtype)
    requests = mixed_requests(runner)
    together = runner.capture_many(requests)
    assert len(together) == len(requests)
    for capture, request in zip(together, requests, strict=True):
        assert_same(capture, runner.capture(request), TOLERANCE[dtype])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_query_views_alone_stop_at_the_deepest_head_of_all(family: str) -> None:
    """The pass stops for the deepest of the mates, and the others' heads are read on the way."""
    runner = tiny_runner(family, DOUBLE)
    requests = [replace(request, views=("query",)) for request in mixed_requests(runner)]
    for heads in ((HeadId(1, 0),), None):
        chosen = [replace(r, heads=heads if i % 2 else (HeadId(0, 2),)) for i, r in enumerate(requests)]
        with Work(runner._model) as work:
            together = runner.capture_many(chosen)
        deepest = 1 if heads else runner.info.n_layers - 1
        assert work.calls[f"model.layers.{deepest}.self_attn.k_proj"] == len(work.tokens)
        assert work.calls[f"model.layers.{deepest}.mlp"] == 0
        for capture, request in zip(together, chosen, strict=True):
            assert_same(capture, runner.capture(request), 1e-12)


@pytest.mark.parametrize("order", range(3))
def test_the_order_of_requests_changes_nothing(order: int) -> None:
    runner = tiny_runner("gemma3_text", DOUBLE)
    requests = mixed_requests(runner)
    places = random.Random(order).sample(range(len(requests)), len(requests))
    straight = runner.capture_many(requests)
    mixed = runner.capture_many([requests[i] for i in places])
    for i, capture in zip(places, mixed, strict=True):
        assert_same(capture, straight[i], 1e-12)


@pytest.mark.parametrize(
    ("family", "tokens"), [("llama", 7), ("gemma3_text", 7), *((family, 64) for family in FAMILIES)]
)
def test_passes_smaller_than_the_prompt_change_nothing(
    family: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents, queries, prefixes and tails that are longer than a pass included."""
    runner = tiny_runner(family, DOUBLE)
    requests = mixed_requests(runner)
    layouts = [request.layout for request in requests]
    assert all(layout.length > 7 for layout in layouts)
    assert max(block.length for layout in layouts for block in layout.blocks) > 64
    assert max(layout.query.length for layout in layouts) > 7 < layouts[0].prefix_end
    whole = runner.capture_many(requests)
    small_passes(monkeypatch, tokens)
    with Work(runner._model) as work:
        stepped = runner.capture_many(requests)
    assert max(work.tokens) <= tokens
    for a, b in zip(stepped, whole, strict=True):
        assert_same(a, b, 1e-12)


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_a_query_longer_than_a_pass(style: PromptStyle, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner("mistral", DOUBLE)
    request = CaptureRequest(prompt(runner, query="Who wrote it, and who lit the lamp? " * 4, style=style))
    whole = runner.capture(request)
    assert request.layout.query.length > 64
    small_passes(monkeypatch, 20)
    assert_same(runner.capture(request), whole, 1e-12)


@pytest.mark.parametrize("elements", [1, 1000])
def test_chunks_of_rows_change_nothing(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner("gemma2", DOUBLE)
    requests = mixed_requests(runner)
    whole = runner.capture_many(requests)
    monkeypatch.setattr(tap, "_MAX_ROW_ELEMENTS", elements)
    for a, b in zip(runner.capture_many(requests), whole, strict=True):
        assert_same(a, b, 1e-12)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_padding_changes_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of very different lengths, as one padded batch or in as many as there are lengths."""
    runner = tiny_runner(family, DOUBLE)
    documents = ["x", *DOCUMENTS, "Ada " * 40, "", "lamp " * 39, "y"]
    requests = [
        CaptureRequest(prompt(runner, documents, style=PARALLEL), None, BOTH, 1),
        CaptureRequest(prompt(runner, documents[:3], "When?", style=PARALLEL)),
    ]
    sizes: list[int] = []
    honest = packed.Pass._batch

    def spy(self: Any, runs: list[Any], device: torch.device) -> Any:
        sizes.append(len(runs))
        return honest(self, runs, device)

    monkeypatch.setattr(packed.Pass, "_batch", spy)
    largest, captures = [], []
    for padding in (1.0, 1.25, 100.0):
        sizes.clear()
        monkeypatch.setattr(packed, "_PADDING", padding)
        captures.append(runner.capture_many(requests))
        largest.append(max(sizes))
    assert largest == [2, 3, 8]
    for captured in captures[1:]:
        for a, b in zip(captured, captures[0], strict=True):
            assert_same(a, b, 1e-12)


def tokens_of(runner: HFRunner, requests: list[CaptureRequest]) -> int:
    """Tokens that enter the model."""
    with Work(runner._model) as work:
        runner.capture_many(requests)
    return sum(work.tokens)


def test_what_joint_prompts_share_is_computed_once() -> None:
    runner = tiny_runner("llama", DOUBLE)
    a, b, c = DOCUMENTS
    first, same, third = prompt(runner, [a, b, c]), prompt(runner, [a, b, c]), prompt(runner, [a, c])
    tail = first.length - first.tail_start
    assert tokens_of(runner, [CaptureRequest(first)]) == first.length
    # The third shares the prefix and the first document.
    own = third.length - third.blocks[1].start
    requests = [CaptureRequest(layout) for layout in (first, same, third)]
    assert tokens_of(runner, requests) == first.length + tail + own


def test_what_parallel_prompts_share_is_computed_once() -> None:
    runner = tiny_runner("llama", DOUBLE)
    a, b, c = DOCUMENTS
    first = prompt(runner, [a, b, a, a], style=PARALLEL)
    second = prompt(runner, [c, b], "When?", PARALLEL)
    once = first.length - 2 * first.blocks[0].length
    assert tokens_of(runner, [CaptureRequest(first)]) == once
    own = second.blocks[0].length + second.length - second.tail_start
    assert tokens_of(runner, [CaptureRequest(first), CaptureRequest(second)]) == once + own
    # With the query in the prefix, another query shares nothing.
    bare = [prompt(runner, query=query, style=BARE) for query in ("Who?", "When?")]
    expected = sum(layout.length for layout in bare)
    assert tokens_of(runner, [CaptureRequest(layout) for layout in bare]) == expected


def test_joint_and_parallel_prompts_share_the_prefix_alone() -> None:
    runner = tiny_runner("llama", DOUBLE)
    joint, parallel = prompt(runner), prompt(runner, style=PARALLEL)
    requests = [CaptureRequest(joint), CaptureRequest(parallel)]
    assert tokens_of(runner, requests) == joint.length + parallel.length - joint.prefix_end
