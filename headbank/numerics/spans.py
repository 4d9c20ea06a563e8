"""From attention per token to attention per document."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headbank.types import Span


def span_mass(token_mass: Tensor, spans: Sequence[Span]) -> Tensor:
    """`mass[..., D] = sum over j in span D of token_mass[..., j]`, in float64.

    `token_mass` is [..., T]; spans may overlap, and an empty one has mass 0. Returns [..., D] float64. Each
    span is summed on its own: differences of a running sum would cancel the small masses of long prompts,
    and would carry a NaN of one document into all later ones. Raises ValueError for a span that does not lie
    in [0, T].
    """
    tokens = token_mass.shape[-1]
    if not spans:
        return token_mass.new_zeros((*token_mass.shape[:-1], 0), dtype=torch.float64)
    for span in spans:
        _check_span(span, tokens)
    return torch.stack([token_mass[..., s:e].sum(-1, dtype=torch.float64) for s, e in spans], dim=-1)


def span_mean(mass: Tensor, lengths: Tensor) -> Tensor:
    """Expert Heads (ICLR 2026): `A[l,h,D] = mean over s in S, j in D of attention[l,h,s,j]`.

    `mass` [..., D] is already averaged over the source rows, so what is left is to divide by `lengths` [D],
    the tokens of each document. Returns [..., D] float64, 0 where the length is 0.
    """
    mass = mass.to(torch.float64)
    return torch.where(lengths > 0, mass / lengths.clamp(min=1), torch.zeros_like(mass))


def top_windows(token_mass: Tensor, span: Span, width: int, count: int) -> list[Span]:
    """The most attended stretches of a document: up to `count` windows of `width` tokens, best first.

    `token_mass` is [T]. Windows start anywhere in the span and are taken greedily, so each is the best of
    those that overlap none before it; equal windows go by position. A span of at most `width` tokens is one
    window; an empty span has none. Raises ValueError for a width below 1, a negative count, or a span that
    does not lie in [0, T].
    """
    if width < 1 or count < 0:
        raise ValueError(f"width must be at least 1 and count at least 0, got {width} and {count}")
    _check_span(span, token_mass.shape[-1])
    if span.length == 0 or count == 0:
        return []
    if span.length <= width:
        return [span]
    sums = token_mass[span.start : span.end].unfold(0, width, 1).sum(-1, dtype=torch.float64)
    free = torch.ones_like(sums, dtype=torch.bool)
    windows: list[Span] = []
    while len(windows) < count and bool(free.any()):
        first = int(sums.masked_fill(~free, -torch.inf).argmax())
        windows.append(Span(span.start + first, span.start + first + width))
        free[max(0, first - width + 1) : first + width] = False
    return windows


def _check_span(span: Span, tokens: int) -> None:
    if not 0 <= span.start <= span.end <= tokens:
        raise ValueError(f"span [{span.start}, {span.end}) does not lie in the {tokens} tokens of the prompt")
