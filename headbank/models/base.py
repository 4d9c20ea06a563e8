"""What every engine offers to the layers above: token ids in, attention masses out.

Engines: `headbank.models.hf` (transformers) and `headbank.models.fake` (planted heads, no weights).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headbank.types import HeadId, ModelInfo, PromptLayout, View


@dataclass(frozen=True)
class Capture:
    """Attention of chosen heads on the prompt, averaged over the source rows of each view."""

    heads: tuple[HeadId, ...]
    """The n heads, in the order of the rows below."""
    mass: dict[View, torch.Tensor]
    """View -> [n, T] float32 (float64 for a float64 model): attention on every prompt token, averaged over the view's
    source rows. Columns of generated tokens are left out, so a response row may sum to less than 1."""
    source: dict[View, tuple[int, ...]]
    """View -> positions of the source rows; the response continues after the prompt, at T, T+1, ..."""
    response: tuple[int, ...] = ()
    """Token ids that the model wrote, end marker excluded; empty unless the response view was asked for."""


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
        max_tokens_per_doc: int | None = None,
        reserve_tokens: int = 0,
    ) -> PromptLayout:
        """Lay out a prompt, documents in the given order.

        `reserve_tokens` of the context are kept free for a response. Raises InputTooLong (field `query` or
        `documents`) when the query takes more than half the context or the whole does not fit.
        """
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

    def capture(
        self,
        layout: PromptLayout,
        *,
        heads: Sequence[HeadId] | None = None,
        views: Sequence[View] = ("query",),
        max_new_tokens: int = 16,
    ) -> Capture:
        """Read heads (all of them when `heads` is None) over one prompt.

        With the query view alone nothing after the deepest head is computed. With the response view the model
        writes up to `max_new_tokens` tokens greedily on the same cache and the rows of those tokens are read. Raises
        InputError for a head that the model does not have, no head, or `max_new_tokens` below 1.
        """
        ...

    def capture_many(
        self,
        layouts: Sequence[PromptLayout],
        *,
        heads: Sequence[HeadId] | None = None,
        views: Sequence[View] = ("query",),
        max_new_tokens: int = 16,
    ) -> list[Capture]:
        """`capture` for several prompts; what a prompt shares with the one before it is computed once."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text."""
        ...
