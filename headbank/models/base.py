"""What every engine offers to the layers above: token ids in, attention masses out.

Engines: `headbank.models.hf` (transformers) and `headbank.models.fake` (planted heads, no weights).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headbank.types import JOINT, HeadId, ModelInfo, PromptLayout, PromptStyle, Span, View

NULL_QUERY = "N/A"
"""The content-free query whose attention is taken off by calibrated scores (ICR, arXiv 2410.02642)."""


@dataclass(frozen=True)
class User:
    """Text of a user inside a chat prompt: its special tokens stay text."""

    text: str


def tail_position(style: PromptStyle, prefix_end: int, blocks: Sequence[Span], tail_start: int) -> int:
    """Where the tail stands: in `parallel` after the longest of the blocks, which all begin at `prefix_end`."""
    if style.layout == "parallel" and style.tail == "longest":
        return prefix_end + max((block.length for block in blocks), default=0)
    return tail_start


@dataclass(frozen=True)
class CaptureRequest:
    """Which heads to read over which prompt."""

    layout: PromptLayout
    heads: tuple[HeadId, ...] | None = None
    """None: all of the model."""
    views: tuple[View, ...] = ("query",)
    max_new_tokens: int = 16
    """Longest answer that the response view writes."""


@dataclass(frozen=True)
class Capture:
    """Attention of chosen heads on the prompt, averaged over the source rows of each view."""

    heads: tuple[HeadId, ...]
    """The n heads, in the order of the rows below."""
    mass: dict[View, torch.Tensor]
    """View -> [n, T] float32 (float64 for a float64 model): attention on every prompt token, averaged over the view's
    source rows. Columns of generated tokens are left out, so a response row may sum to less than 1."""
    source: dict[View, tuple[int, ...]]
    """View -> positions of the source rows in `layout.ids`; the response continues after them, at T, T+1, ..."""
    response: tuple[int, ...] = ()
    """Token ids that the model wrote, end marker excluded; empty unless the response view was asked for."""
    steps: torch.Tensor | None = None
    """[S, n, T], the row of every written token, whose mean is `mass["response"]`; None without a response."""


class Prompts(Protocol):
    """Builds prompts for one model from text, one token segment at a time."""

    @property
    def template_hash(self) -> str:
        """Hash of the fixed parts of the prompt and of the options that shape it."""
        ...

    def build(
        self,
        query: str,
        documents: Sequence[str],
        *,
        style: PromptStyle = JOINT,
        max_tokens_per_doc: int | None = None,
        reserve_tokens: int = 0,
    ) -> PromptLayout:
        """Lay out a prompt, documents in the given order.

        `reserve_tokens` of the context are kept free for a response. Raises InputTooLong (field `query` or
        `documents`) when the query takes more than half the context or the whole does not fit.
        """
        ...

    def chat(self, parts: Sequence[str | User]) -> tuple[int, ...]:
        """Token ids of one user message in the model's chat template; raises InputTooLong when it does not fit."""
        ...

    def offsets(self, document: str, n_tokens: int) -> list[tuple[int, int]]:
        """Character range of each of the first `n_tokens` tokens of a document, as `build` encodes it."""
        ...


class HeadRunner(Protocol):
    """An engine that can read attention heads."""

    @property
    def info(self) -> ModelInfo:
        """Identity and shape of the model."""
        ...

    @property
    def prompts(self) -> Prompts:
        """The prompt builder of this model."""
        ...

    def capture(self, request: CaptureRequest) -> Capture:
        """`capture_many` of one request."""
        ...

    def capture_many(self, requests: Sequence[CaptureRequest]) -> list[Capture]:
        """Read heads over several prompts, packed into shared passes.

        What prompts have in common (the same prefix, the same documents after the same tokens) is computed once, and
        batch mates change no number by more than float noise. With query views alone nothing after the deepest head
        is computed; with a response view the model writes greedily on the same keys and values, and the rows of
        those tokens are read. Raises InputError for a head that the model does not have, no head, or
        `max_new_tokens` below 1.
        """
        ...

    def generate(self, ids: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        """What the model writes greedily after `ids`, up to its end marker (left out) or `max_new_tokens` tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text."""
        ...
