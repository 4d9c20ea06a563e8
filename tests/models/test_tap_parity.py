"""Packed passes equal transformers' own eager attention: every family, every style, in float32 and float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headbank.models import packed, tap
from headbank.models.arch import layer_windows
from headbank.models.base import CaptureRequest
from headbank.models.graph import PromptGraph
from headbank.models.packed import KeptRows, Node
from headbank.types import PromptLayout, PromptStyle
from tests.support.reference import PARALLEL, STYLES, assert_greedy, eager_prompt, positions_of, sight_of
from tests.support.tiny_models import FAMILIES, WINDOW, eager_rows, random_ids, tiny_model, tiny_runner

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
QUERY = "Who wrote it, and when?"
DOCUMENTS = (
    "The lamp was lit by Ada in the evening, when",
    "Ada wrote the book in 1843, and the lamp was lit by her in the evening of the day.",
    "Nobody 🙂.",
    "",
    "The lamp was lit by Ada.",
    "Nobody 🙂.",
)
"""The second ends where the tail of a parallel prompt begins, but is far from it in the row."""

WINDOWED = tuple(family for family in FAMILIES if any(layer_windows(tiny_model(family).config)))

Rows = list[Tensor]
"""Per layer, rows [H, S, T]."""


def prompt(family: str, style: PromptStyle) -> PromptLayout:
    return tiny_runner(family).prompts.build(QUERY, DOCUMENTS, style=style)


def read_query(family: str, dtype: torch.dtype, layout: PromptLayout) -> tuple[Rows, Node]:
    """Every head's rows of the query's tokens, and the last node of the prompt, with logits."""
    runner = tiny_runner(family, dtype)
    found = KeptRows()
    graph = PromptGraph(None, runner.info.n_layers)
    heads = {layer: torch.arange(runner.info.n_heads) for layer in range(runner.info.n_layers)}
    last = graph.add(layout, heads, found, writes=True)
    with torch.inference_mode():
        runner._run(graph.nodes, None)
    return [found.rows(layer) for layer in heads], last


def query_of(rows: Rows, layout: PromptLayout) -> Rows:
    return [layer[:, layout.query.start : layout.query.end] for layer in rows]


def farthest(got: Rows, expected: Rows) -> float:
    """The largest difference of all layers; NaN if there is one."""
    assert len(got) == len(expected) >= 2
    assert [rows.shape for rows in got] == [rows.shape for rows in expected]
    return float(torch.stack([(a - b).abs().max() for a, b in zip(got, expected, strict=True)]).max())


def check(family: str, compare: Callable[[torch.dtype], tuple[Rows, Rows]]) -> None:
    """Run a comparison in both precisions; every layer must agree, and all figures are in the message."""
    worst: dict[torch.dtype, list[float]] = {}
    for dtype in TOLERANCE:
        got, expected = compare(dtype)
        assert all(rows.dtype == dtype for rows in got)
        worst[dtype] = [farthest([a, a], [b, b]) for a, b in zip(got, expected, strict=True)]
    table = "\n".join(
        f"  layer {layer}: float32 {single:.1e}, float64 {double:.1e}"
        for layer, (single, double) in enumerate(zip(*worst.values(), strict=True))
    )
    for dtype, tolerance in TOLERANCE.items():
        # `not <=` so that NaN fails too.
        wrong = [layer for layer, difference in enumerate(worst[dtype]) if not difference <= tolerance]
        assert not wrong, f"{family}: layers {wrong} are off by more than {tolerance} in {dtype}\n{table}"


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_the_query(family: str, style: PromptStyle) -> None:
    layout = prompt(family, style)

    def compare(dtype: torch.dtype) -> tuple[Rows, Rows]:
        reference, _ = eager_prompt(tiny_model(family, dtype), layout)
        return read_query(family, dtype, layout)[0], query_of(reference, layout)

    check(family, compare)


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_after_the_prompt(family: str, style: PromptStyle) -> None:
    layout = prompt(family, style)
    for dtype, tolerance in ((torch.float32, 2e-4), (torch.float64, 1e-5)):
        logits = read_query(family, dtype, layout)[1].logits
        assert logits is not None
        expected = eager_prompt(tiny_model(family, dtype), layout)[1][-1]
        assert expected.std() > 1
        # Logits are rounded to float32.
        torch.testing.assert_close(logits.to(dtype), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_and_every_row_of_it(family: str, style: PromptStyle) -> None:
    """The written tokens are those of eager attention, and their rows those of the same tokens fed back."""
    layout = prompt(family, style)

    def compare(dtype: torch.dtype) -> tuple[Rows, Rows]:
        runner, model = tiny_runner(family, dtype), tiny_model(family, dtype)
        capture = runner.capture(CaptureRequest(layout, None, ("response",), 5))
        assert capture.steps is not None
        reference, logits = eager_prompt(model, layout, capture.response)
        assert_greedy(logits, layout.length, capture.response, 5, runner._stops)
        steps = capture.steps.unflatten(1, (runner.info.n_layers, -1))  # [S, L, H, T]
        written = [layer[:, layout.length :, : layout.length] for layer in reference]
        return list(steps.permute(1, 2, 0, 3)), written

    check(family, compare)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_exact_and_sharp(family: str) -> None:
    """The written-out mask of a joint prompt gives what the model gives by itself, far from uniform."""
    model, layout = tiny_model(family, torch.float64), prompt(family, PromptStyle())
    rows, logits = eager_prompt(model, layout)
    own, own_logits = eager_rows(model, torch.tensor([layout.ids]))
    assert farthest(rows, [layer[0] for layer in own]) < 1e-14
    torch.testing.assert_close(logits, own_logits[0], atol=1e-12, rtol=0)
    short, _ = eager_rows(model, random_ids(1, 40))
    for layer in short:
        # A softmax rounded to float32 would miss 1 by 1e-8.
        torch.testing.assert_close(layer.sum(-1), torch.ones_like(layer.sum(-1)), atol=1e-14, rtol=0)
        # Uniform rows would have a largest weight of 1/12 to 1/40 here, and parity would mean little.
        assert layer[:, :, WINDOW:].amax(-1).median() > 0.15


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_would_notice_documents_that_see_each_other_and_a_shifted_tail(family: str) -> None:
    model, layout = tiny_model(family, torch.float64), prompt(family, PARALLEL)
    got, _ = read_query(family, torch.float64, layout)
    open_sight = torch.ones(layout.length, layout.length, dtype=torch.bool).tril()
    assert not torch.equal(open_sight, sight_of(layout))
    shifted = PromptLayout(**{**vars(layout), "tail_position": layout.tail_position + 1})
    for wrong in (eager_prompt(model, layout, sees=open_sight), eager_prompt(model, shifted)):
        assert farthest(got, query_of(wrong[0], layout)) > 0.005


@pytest.mark.parametrize("family", WINDOWED)
def test_parity_would_notice_windows_by_place_in_the_row(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layout = tiny_model(family, torch.float64), prompt(family, PARALLEL)
    right = query_of(eager_prompt(model, layout)[0], layout)
    wrong = query_of(eager_prompt(model, layout, places=torch.arange(layout.length))[0], layout)
    assert farthest(right, wrong) > 0.1
    honest = packed._Batch._mask

    def by_place(batch: Any, window: int | None) -> Tensor | None:
        known = len(batch.positions)
        places = torch.arange(batch.runs[0].start - known, batch.runs[0].start)
        kept, batch.positions = batch.positions, places
        try:
            return honest(batch, window)
        finally:
            batch.positions = kept

    monkeypatch.setattr(packed._Batch, "_mask", by_place)
    got, _ = read_query(family, torch.float64, layout)
    assert farthest(got, right) > 0.1


@pytest.mark.parametrize("style", [PromptStyle(), PARALLEL], ids=str)
@pytest.mark.parametrize("family", WINDOWED)
def test_parity_would_notice_rows_without_a_mask(
    family: str, style: PromptStyle, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = prompt(family, style)
    right = query_of(eager_prompt(tiny_model(family, torch.float64), layout)[0], layout)
    honest = tap.attention_rows

    def blind(query: Any, key: Any, mask: Any, **rest: Any) -> Tensor:
        return honest(query, key, None, **rest)

    monkeypatch.setattr(tap, "attention_rows", blind)
    assert farthest(read_query(family, torch.float64, layout)[0], right) > 0.1


@pytest.mark.parametrize(
    ("family", "sliding"),
    [
        ("mistral", (True, True, True)),
        ("qwen2", (False, False, True)),
        ("gemma2", (True, False, True, False)),
        ("gemma3_text", (True, False, True, False)),
        ("llama", (False, False, False)),
    ],
)
@pytest.mark.parametrize("style", STYLES, ids=str)
def test_a_sliding_layer_sees_what_is_near_in_position(
    family: str, sliding: tuple[bool, ...], style: PromptStyle
) -> None:
    layout = prompt(family, style)
    rows, _ = read_query(family, torch.float32, layout)
    positions = positions_of(layout)
    assert len(rows) == len(sliding)
    for layer, is_sliding in zip(rows, sliding, strict=True):
        for row, token in enumerate(range(*layout.query)):
            seen = torch.arange(layout.length) <= token
            if is_sliding:
                seen &= positions[token] - positions < WINDOW
            assert torch.all(layer[:, row, ~seen] == 0)
            assert torch.all(layer[:, row, seen] > 0)


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_of_parallel_prompts_reach_the_longest_document_wherever_it_stands(family: str) -> None:
    layout = prompt(family, PARALLEL)
    longest, last = layout.blocks[1], layout.blocks[-1]
    assert longest.length == max(block.length for block in layout.blocks) > last.length + WINDOW
    assert layout.query.start - longest.end > 2 * WINDOW > layout.query.start - last.end
    rows, _ = read_query(family, torch.float32, layout)
    for layer, window in zip(rows, layer_windows(tiny_model(family).config), strict=True):
        if window is not None:
            assert torch.all(layer[:, 0, longest.end - 3 : longest.end] > 0)
            assert torch.all(layer[:, 0, last.start : last.end] == 0)
