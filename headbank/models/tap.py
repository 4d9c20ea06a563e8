"""The attention tap: softmax rows of chosen heads, read while the model runs.

One attention function is registered with `transformers.AttentionInterface`. During a packed pass it answers the model
with SDPA over each stretch's own context and, for the wanted heads and source rows only, computes the softmax rows
from the same queries and keys, with the model's own scaling, sliding windows and soft-cap. Nothing of size
[L, H, T, T] is ever built, and no mask over the whole row.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from headbank.errors import UnsupportedModel
from headbank.models.packed import Pass

ATTENTION_NAME = "headrank_tap"
"""The value of `attn_implementation` that selects the tap."""

_MAX_ROW_ELEMENTS = 1 << 25
"""Softmax rows are computed in chunks of source rows of at most this many elements (128 MiB in float32)."""


class _StopForward(Exception):
    """Raised at the layer after which nothing is needed."""


_active: ContextVar[tuple[Pass, Sequence[int | None]] | None] = ContextVar("headrank_pass", default=None)


@contextmanager
def tapping(packed: Pass, windows: Sequence[int | None]) -> Iterator[None]:
    """Run the model call inside the block as a packed pass, cut short at `packed.stop_at`.

    `windows` is the sliding window of each layer in tokens, None where a layer sees everything. [L]
    """
    token = _active.set((packed, windows))
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
    """Softmax rows of chosen heads: softmax_j(softcap(scaling * q_s . k_j)) over the keys j that row s sees.

    Shapes: query [B, H, N, d_h], key [B, K, T, d_h] with the N queries at the end of the T keys; mask [N, T] bool,
    True where a query sees a key, None for plain causality; heads [n], source [S] int64 -> [B, n, S, T], float32
    (float64 for float64 inputs).
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    q = query[:, heads][:, :, source].to(dtype)  # [B, n, S, d_h]
    k = key[:, heads // group].to(dtype)  # [B, n, T, d_h]
    scores = torch.matmul(q, k.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        last = source + (key.shape[2] - query.shape[2])
        visible = torch.arange(key.shape[2], device=query.device) <= last[:, None]
    else:
        visible = mask[source]
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)


def _chunks(n_rows: int, row_elements: int) -> Iterator[tuple[int, int]]:
    step = max(1, _MAX_ROW_ELEMENTS // max(1, row_elements))
    for start in range(0, n_rows, step):
        yield start, min(start + step, n_rows)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """Attention output [B, H, N, d_h] of a soft-capped layer, which SDPA cannot compute."""
    heads = torch.arange(query.shape[1], device=query.device)
    wide_value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    outputs = []
    for start, end in _chunks(query.shape[2], query.shape[0] * query.shape[1] * key.shape[2]):
        source = torch.arange(start, end, device=query.device)
        rows = attention_rows(query, key, mask, heads=heads, source=source, scaling=scaling, softcap=softcap)
        outputs.append(torch.matmul(rows.to(value.dtype), wide_value))
    return torch.cat(outputs, dim=2)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention output [B, H, N, d_h]."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type != "cpu":
        # Grouped heads together with a mask send CUDA to its slowest kernel.
        group = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), False
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=grouped,
    )


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

    query [1, H, T, d_h], key and value [1, K, T, d_h] of the whole row of tokens -> [1, T, H, d_h]. Raises
    UnsupportedModel for attention sinks, whose softmax has a denominator the tap does not compute, for a mask of the
    model's own, and outside of a packed pass.
    """
    if attention_mask is not None:
        raise UnsupportedModel("a mask of the model's own is not supported")
    if kwargs.get("s_aux") is not None:
        raise UnsupportedModel("attention sinks are not supported: their softmax has an extra term")
    active = _active.get()
    if active is None:
        raise UnsupportedModel("the attention tap works inside a packed pass only")
    packed, windows = active
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1])
    packed.store(key, value)
    ends = packed.stop_at == layer
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    for batch in packed.batches:
        reads = [(source, read) for source, read in batch.reads() if layer in read.heads]
        if ends and not reads:
            continue
        queries, keys = batch.queries(query), batch.keys(layer, 0, key)
        mask = batch.mask(windows[layer])
        for source, read in reads:
            heads = read.heads[layer]
            for start, end in _chunks(len(source), len(heads) * keys.shape[2]):
                chunk = source[start:end].to(query.device)
                rows = attention_rows(
                    queries, keys, mask, heads=heads, source=chunk, scaling=scale, softcap=softcap
                )
                read.reducer.add(layer, rows[0])
        if ends:
            continue
        values = batch.keys(layer, 1, value)
        if softcap is None:
            found = _sdpa(queries, keys, values, mask, scale)
        else:
            found = _softcapped(queries, keys, values, mask, scale, softcap)
        found = found.transpose(1, 2)  # [B, N, H, d_h]
        if batch.filled is None:
            output[batch.index] = found[0]
        else:
            output[batch.index[batch.filled]] = found[batch.filled]  # type: ignore[index]
    if ends:
        raise _StopForward
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, tapped_attention)
