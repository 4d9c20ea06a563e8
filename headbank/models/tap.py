"""The attention tap: softmax rows of chosen heads, read while the model runs.

One attention function is registered with `transformers.AttentionInterface`. It answers the model with SDPA and, at
tapped layers only, computes the softmax rows of the wanted heads and source rows from the same queries and keys, with
the model's own mask, sliding window and soft-cap. Nothing of size [L, H, T, T] is ever built.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headbank.errors import UnsupportedModel

ATTENTION_NAME = "headrank_tap"
"""The value of `attn_implementation` that selects the tap."""

_MAX_ROW_ELEMENTS = 1 << 25
"""Softmax rows are computed in chunks of source rows of at most this many elements (128 MiB in float32)."""


class Reducer(Protocol):
    """Takes the rows of one layer as soon as they exist, so that they can be summed instead of stored."""

    def add(self, layer: int, rows: Tensor) -> None:
        """Take rows [B, n, S, T] of one layer (S may be a chunk of the source rows)."""
        ...


@dataclass
class Tap:
    """What to read during one forward pass."""

    heads: Mapping[int, Tensor]
    """Layer -> indices of the query heads to read. [n] int64"""
    source: Tensor
    """Source rows as indices on the query axis of this pass. [S], or [B, S] where batch mates differ; int64"""
    reducer: Reducer
    stop_at: int | None = None
    """End the pass at this layer, as soon as its queries and keys are known; None runs to the end."""


@dataclass
class RowStore:
    """Keeps every row; for tests, dumps and short prompts."""

    chunks: dict[int, list[Tensor]] = field(default_factory=dict)

    def add(self, layer: int, rows: Tensor) -> None:
        """Keep rows [B, n, S, T]."""
        self.chunks.setdefault(layer, []).append(rows)

    def rows(self, layer: int) -> Tensor:
        """All rows of a layer, [B, n, S, T]."""
        return torch.cat(self.chunks[layer], dim=2)


@dataclass
class TokenMass:
    """Sums rows over the source, keeping the columns of the first `n_tokens` keys."""

    n_tokens: int
    totals: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> [B, n, n_tokens], the sum over the source rows seen so far."""

    def add(self, layer: int, rows: Tensor) -> None:
        """Add rows [B, n, S, T >= n_tokens]."""
        total = rows[..., : self.n_tokens].sum(dim=2)
        if layer in self.totals:
            self.totals[layer] += total
        else:
            self.totals[layer] = total


class _StopForward(Exception):
    """Raised at the layer after which nothing is needed."""


_active: ContextVar[Tap | None] = ContextVar("headrank_tap", default=None)


@contextmanager
def tapping(tap: Tap) -> Iterator[None]:
    """Read `tap` during the model call inside the block; the call is cut short at `tap.stop_at`."""
    token = _active.set(tap)
    try:
        yield
    except _StopForward:
        pass
    finally:
        _active.reset(token)


def attention_rows(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    *,
    heads: Tensor,
    source: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """Softmax rows of chosen heads: softmax_j(softcap(scaling * q_s . k_j) + mask[s, j]).

    Shapes: query [B, H, Tq, d_h], key [B, K, T, d_h] with the Tq queries at the end of the T keys; mask None (plain
    causal), bool or additive [B or 1, 1 or H, Tq, T]; heads [n]; source [B, S] -> [B, n, S, T], float32 (float64 for
    float64 inputs).
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch = torch.arange(query.shape[0], device=query.device)[:, None]
    group = query.shape[1] // key.shape[1]
    q = query[:, heads][batch, :, source].transpose(1, 2).to(dtype)  # [B, n, S, d_h]
    k = key[:, heads // group].to(dtype)  # [B, n, T, d_h]
    scores = torch.matmul(q, k.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    n_new, n_keys = query.shape[2], key.shape[2]
    if mask is None:
        positions = source + (n_keys - n_new)
        visible = torch.arange(n_keys, device=query.device) <= positions[..., None]  # [B, S, T]
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
    else:
        per_head = mask[:, heads] if mask.shape[1] > 1 else mask
        per_head = per_head.expand(query.shape[0], -1, -1, -1)[..., :n_keys]
        rows = per_head[batch, :, source].transpose(1, 2)  # [B, 1 or n, S, T]
        if rows.dtype == torch.bool:
            scores = scores.masked_fill(~rows, -torch.inf)
        else:
            scores = scores + rows.to(dtype)
    return torch.softmax(scores, dim=-1)


def _read(tap: Tap, layer: int, query: Tensor, key: Tensor, mask: Tensor | None, **scores: Any) -> None:
    heads = tap.heads[layer].to(query.device)
    source = tap.source.to(query.device)
    if source.dim() == 1:
        source = source.expand(query.shape[0], -1)
    step = max(1, _MAX_ROW_ELEMENTS // (query.shape[0] * len(heads) * key.shape[2]))
    for start in range(0, source.shape[1], step):
        chunk = source[:, start : start + step]
        tap.reducer.add(layer, attention_rows(query, key, mask, heads=heads, source=chunk, **scores))


def _softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """Attention output of a soft-capped layer, which SDPA cannot compute; [B, Tq, H, d_h]."""
    n_heads, n_new = query.shape[1:3]
    heads = torch.arange(n_heads, device=query.device)
    group = n_heads // key.shape[1]
    wide_value = value.repeat_interleave(group, dim=1)
    step = max(1, _MAX_ROW_ELEMENTS // (query.shape[0] * n_heads * key.shape[2]))
    outputs = []
    for start in range(0, n_new, step):
        source = torch.arange(start, min(start + step, n_new), device=query.device).expand(query.shape[0], -1)
        rows = attention_rows(query, key, mask, heads=heads, source=source, scaling=scaling, softcap=softcap)
        # A padding row sees nothing and its softmax is NaN; eager attention leaves finite noise there.
        outputs.append(torch.matmul(torch.nan_to_num(rows).to(value.dtype), wide_value))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def tapped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function given to transformers; its signature is fixed by `AttentionInterface`.

    Raises UnsupportedModel for attention sinks, whose softmax has a denominator the tap does not compute.
    """
    if kwargs.get("s_aux") is not None:
        raise UnsupportedModel("attention sinks are not supported: their softmax has an extra term")
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1])
    tap = _active.get()
    if tap is not None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if layer in tap.heads:
            _read(tap, layer, query, key, attention_mask, scaling=scale, softcap=softcap)
        if tap.stop_at == layer:
            raise _StopForward
    if softcap is not None:
        return _softcapped_attention(query, key, value, attention_mask, scale, softcap), None
    output: Tensor = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scale, **kwargs
    )[0]
    return output, None


AttentionInterface.register(ATTENTION_NAME, tapped_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
