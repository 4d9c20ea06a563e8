"""Tapped rows equal transformers' own eager attention, for every family, in float32 and float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from headbank.models import tap
from headbank.models.tap import RowStore, Tap, tapping
from tests.support.tiny_models import FAMILIES, WINDOW, eager_rows, random_ids, tiny_model

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
LENGTH = 40
SOURCE = torch.tensor([0, 1, 11, 12, 26, 39])
"""First row, last row, and rows on both sides of the sliding window."""

Rows = list[torch.Tensor]
"""Per layer, rows [B, H, S, T]."""


@torch.no_grad()
def tapped(model: Any, ids: torch.Tensor, source: torch.Tensor, **inputs: Any) -> tuple[Rows, torch.Tensor]:
    """Rows of all heads of every layer, and the logits."""
    layers = range(model.config.num_hidden_layers)
    store = RowStore()
    heads = {layer: torch.arange(model.config.num_attention_heads) for layer in layers}
    with tapping(Tap(heads, source, store)):
        out = model(input_ids=ids, **{"use_cache": False, **inputs})
    return [store.rows(layer) for layer in layers], out.logits


def check(family: str, compare: Callable[[Any], tuple[Rows, Rows]]) -> None:
    """Run a comparison in both precisions; every layer must agree, and all figures are in the message."""
    worst: dict[torch.dtype, list[float]] = {}
    for dtype in TOLERANCE:
        got, expected = compare(tiny_model(family, dtype))
        assert len(got) == len(expected) >= 2
        for rows, reference in zip(got, expected, strict=True):
            assert rows.dtype == dtype
            assert rows.shape == reference.shape
        worst[dtype] = [float((a - b).abs().max()) for a, b in zip(got, expected, strict=True)]
    table = "\n".join(
        f"  layer {layer}: float32 {single:.1e}, float64 {double:.1e}"
        for layer, (single, double) in enumerate(zip(*worst.values(), strict=True))
    )
    for dtype, tolerance in TOLERANCE.items():
        # `not <=` so that NaN fails too.
        wrong = [layer for layer, difference in enumerate(worst[dtype]) if not difference <= tolerance]
        assert not wrong, f"{family}: layers {wrong} are off by more than {tolerance} in {dtype}\n{table}"


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_plain_prompt(family: str) -> None:
    def compare(model: Any) -> tuple[Rows, Rows]:
        ids = random_ids(1, LENGTH)
        reference, _ = eager_rows(model, ids)
        return tapped(model, ids, SOURCE)[0], [rows[:, :, SOURCE] for rows in reference]

    check(family, compare)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_exact_and_sharp(family: str) -> None:
    rows, _ = eager_rows(tiny_model(family, torch.float64), random_ids(1, LENGTH))
    for layer in rows:
        # A softmax rounded to float32 would miss 1 by 1e-8.
        torch.testing.assert_close(layer.sum(-1), torch.ones_like(layer.sum(-1)), atol=1e-14, rtol=0)
        # Uniform rows would have a largest weight of 1/12 to 1/40 here, and parity would mean little.
        assert layer[:, :, WINDOW:].amax(-1).median() > 0.15


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_eager_attention(family: str) -> None:
    for dtype, tolerance in ((torch.float32, 2e-4), (torch.float64, 1e-11)):
        model = tiny_model(family, dtype)
        ids = random_ids(1, LENGTH)
        _, expected = eager_rows(model, ids)
        got = tapped(model, ids, SOURCE)[1]
        assert expected.std() > 1
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)


def padded_batch() -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Prompts of 40 and 29 tokens, the second padded on the left; source rows per batch mate."""
    ids = random_ids(2, LENGTH)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, : LENGTH - 29] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    source = torch.tensor([[0, 5, 20, 39], [11, 12, 25, 39]])
    return ids, {"attention_mask": mask, "position_ids": positions}, source


def pick(rows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Rows [B, H, T, T] at source rows [B, S]."""
    return torch.stack([mate[:, chosen] for mate, chosen in zip(rows, source, strict=True)])


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_batch(family: str) -> None:
    def compare(model: Any) -> tuple[Rows, Rows]:
        ids, inputs, source = padded_batch()
        reference, _ = eager_rows(model, ids, **inputs)
        return tapped(model, ids, source, **inputs)[0], [pick(rows, source) for rows in reference]

    check(family, compare)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_prompt_reads_as_when_alone(family: str) -> None:
    def compare(model: Any) -> tuple[Rows, Rows]:
        ids, inputs, source = padded_batch()
        pad = LENGTH - 29
        together, _ = tapped(model, ids, source, **inputs)
        alone, _ = tapped(model, ids[1:, pad:], source[1] - pad)
        for rows in together:
            assert torch.all(rows[1, :, :, :pad] == 0)
        return [rows[1:, :, :, pad:] for rows in together], alone

    check(family, compare)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tap_that_ignored_the_mask_would_be_far_off(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family, torch.float64)
    ids, inputs, source = padded_batch()
    reference, _ = eager_rows(model, ids, **inputs)
    honest = tap.attention_rows

    def blind(query: Any, key: Any, mask: Any, **rest: Any) -> torch.Tensor:
        return honest(query, key, None, **rest)

    monkeypatch.setattr(tap, "attention_rows", blind)
    rows, _ = tapped(model, ids, source, **inputs)
    assert (rows[0][1] - pick(reference[0], source)[1]).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_prompts_read_as_when_alone(family: str) -> None:
    def compare(model: Any) -> tuple[Rows, Rows]:
        ids = random_ids(1, LENGTH)
        cut = 17
        positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])[None]
        source = torch.tensor([0, 9, 16, 17, 30, 39])
        packed, _ = tapped(model, ids, source, position_ids=positions)
        first, _ = tapped(model, ids[:, :cut], source[:3])
        second, _ = tapped(model, ids[:, cut:], source[3:] - cut)
        for rows in packed:
            assert torch.all(rows[:, :, :3, cut:] == 0)
            assert torch.all(rows[:, :, 3:, :cut] == 0)
        apart = [
            torch.cat([rows[:, :, :3, :cut].flatten(), rows[:, :, 3:, cut:].flatten()]) for rows in packed
        ]
        return apart, [torch.cat([a.flatten(), b.flatten()]) for a, b in zip(first, second, strict=True)]

    check(family, compare)


@pytest.mark.parametrize("steps", [(26,), (9, 20, 35), (39,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_first_and_the_tail_on_top(family: str, steps: tuple[int, ...]) -> None:
    """A full-length cache for every layer: sliding layers are masked by position, not by place in the cache."""

    def compare(model: Any) -> tuple[Rows, Rows]:
        ids = random_ids(1, LENGTH)
        cache = DynamicCache()
        done = 0
        for end in steps:
            tapped(model, ids[:, done:end], torch.tensor([0]), cache=cache, use_cache=True)
            done = end
        source = torch.tensor([done, LENGTH - 1])
        rows, _ = tapped(model, ids[:, done:], source - done, cache=cache, use_cache=True)
        assert cache.get_seq_length() == LENGTH
        reference, _ = eager_rows(model, ids)
        return rows, [layer[:, :, source] for layer in reference]

    check(family, compare)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_source_rows_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(model: Any) -> tuple[Rows, Rows]:
        ids, inputs, source = padded_batch()
        whole, logits = tapped(model, ids, source, **inputs)
        # Two mates, four heads, forty keys: room for three of the four source rows, so the last chunk is short.
        monkeypatch.setattr(tap, "_MAX_ROW_ELEMENTS", 2 * 4 * LENGTH * 3 + 7)
        chunked, chunked_logits = tapped(model, ids, source, **inputs)
        monkeypatch.undo()
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(chunked_logits[real], logits[real], atol=2e-4, rtol=0)
        return chunked, whole

    check(family, compare)


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
def test_a_sliding_layer_sees_nothing_beyond_its_window(family: str, sliding: tuple[bool, ...]) -> None:
    rows, _ = tapped(tiny_model(family), random_ids(1, LENGTH), SOURCE)
    assert len(rows) == len(sliding)
    for layer, is_sliding in zip(rows, sliding, strict=True):
        for row, position in enumerate(SOURCE.tolist()):
            first = max(0, position - WINDOW + 1) if is_sliding else 0
            assert torch.all(layer[:, :, row, :first] == 0)
            assert torch.all(layer[:, :, row, position + 1 :] == 0)
            assert torch.all(layer[:, :, row, first : position + 1] > 0)
