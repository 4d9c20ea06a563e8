"""What eager attention says of a prompt in any style: one row of tokens under one written-out mask."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from headbank.models.arch import layer_windows
from headbank.types import PromptLayout, PromptStyle
from tests.support.tiny_models import eager_rows

PARALLEL = PromptStyle("parallel")
BARE = PromptStyle("parallel", label=False, query_first=True, tail="total")
"""Everything that differs from the defaults at once."""

STYLES = (PromptStyle(), PARALLEL, BARE)

_MASKS_BY_KIND = {"qwen2", "qwen3", "gemma2", "gemma3_text", "cohere2"}
"""Families whose models take one mask per kind of layer; the others take the one mask that all their layers use."""


def positions_of(layout: PromptLayout, n_written: int = 0) -> Tensor:
    """Position of every token of the prompt and of `n_written` tokens after it. [T]"""
    tail = torch.arange(
        layout.tail_position, layout.tail_position + layout.length - layout.tail_start + n_written
    )
    if layout.style.layout == "joint":
        return torch.cat([torch.arange(layout.tail_start), tail])
    blocks = [torch.arange(layout.prefix_end, layout.prefix_end + b.length) for b in layout.blocks]
    return torch.cat([torch.arange(layout.prefix_end), *blocks, tail])


def sight_of(layout: PromptLayout, n_written: int = 0) -> Tensor:
    """Who sees whom, windows aside: causal, and in `parallel` no document sees another. [T, T] bool"""
    n = layout.length + n_written
    sees = torch.ones(n, n, dtype=torch.bool).tril()
    if layout.style.layout == "parallel":
        for b in layout.blocks:
            sees[b.start : b.end, layout.prefix_end : b.start] = False
    return sees


def eager_prompt(
    model: Any,
    layout: PromptLayout,
    written: Sequence[int] = (),
    *,
    sees: Tensor | None = None,
    places: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Every attention row of every layer [H, T, T], and the logits [T, V], of the prompt and what was written.

    `sees` stands in for `sight_of`, `places` for the positions in what windows measure.
    """
    positions = positions_of(layout, len(written))
    places = positions if places is None else places
    sees = sight_of(layout, len(written)) if sees is None else sees
    windows = layer_windows(model.config)
    sizes = {window for window in windows if window is not None}
    assert len(sizes) <= 1

    def additive(mask: Tensor) -> Tensor:
        lowest = torch.finfo(model.dtype).min
        return torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, lowest)[None, None]

    masks = {"full_attention": additive(sees)}
    if sizes:
        near = places[:, None] - places < sizes.pop()
        masks["sliding_attention"] = additive(sees & near)
    if model.config.model_type in _MASKS_BY_KIND:
        mask: Any = masks
    else:
        assert len(set(windows)) == 1
        mask = masks["full_attention" if windows[0] is None else "sliding_attention"]
    ids = torch.tensor([[*layout.ids, *written]])
    rows, logits = eager_rows(model, ids, position_ids=positions[None], attention_mask=mask)
    return [layer[0] for layer in rows], logits[0]


def assert_greedy(
    logits: Tensor, prompt_tokens: int, written: Sequence[int], limit: int, stops: Collection[int]
) -> None:
    """`written` is what a model with these logits [T, V] (of the prompt with `written` after it) writes greedily.

    At least one token, no stop token, at most `limit` tokens.
    """
    choices = logits[prompt_tokens - 1 :].clone()
    assert len(choices) == len(written) + 1
    choices[0, list(stops)] = -torch.inf
    best = choices.argmax(-1).tolist()
    assert tuple(best[:-1]) == tuple(written)
    assert len(written) == limit or best[-1] in stops
