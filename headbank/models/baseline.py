"""The weights of a runner without its tap: plain passes that the engine is measured against."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headbank.models.cache import DocumentCache
from headbank.models.hf import HFRunner
from headbank.models.packed import PASS_TOKENS
from headbank.types import HeadId, Span

PLAIN_ATTENTION = "headrank_plain"
"""transformers' own SDPA attention and masks, under a name of its own so that a pass can be cut short."""


class _StopForward(Exception):
    """Raised at the layer after which nothing is needed."""


_stop_at: ContextVar[int | None] = ContextVar("headrank_plain_stop", default=None)


def _plain_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Ends the pass where the tap does: after the projections and the rotation of the layer, before its attention.

    A soft-cap is left out, which makes the pass faster than the model is: SDPA cannot compute one.
    """
    del softcap
    if module.layer_idx == _stop_at.get():
        raise _StopForward
    output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output


AttentionInterface.register(PLAIN_ATTENTION, _plain_attention)
AttentionMaskInterface.register(PLAIN_ATTENTION, sdpa_mask)


def with_documents(runner: HFRunner, documents: DocumentCache) -> HFRunner:
    """A second runner on the same weights that keeps documents in a cache."""
    return HFRunner(
        runner._model,
        runner._tokenizer,
        model_id=runner.info.model_id,
        revision=runner.info.revision,
        documents=documents,
    )


class PlainModel:
    """Plain forward passes of a runner's weights; all of them inside `attention`."""

    def __init__(self, runner: HFRunner) -> None:
        self._model = runner._model
        ids = [runner._tokenizer(word, add_special_tokens=False)["input_ids"] for word in (" yes", " no")]
        self._yes_no = [int(pieces[-1]) for pieces in ids]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self._model.device
        return device

    @property
    def element_size(self) -> int:
        """Bytes of one number in the model's precision."""
        return int(self._model.dtype.itemsize)

    @contextmanager
    def attention(self, name: str | None) -> Iterator[None]:
        """The model with the named attention (`eager`, `PLAIN_ATTENTION`) inside the block; None leaves it."""
        before = self._model.config._attn_implementation
        if name is not None:
            self._model.set_attn_implementation(name)
        try:
            yield
        finally:
            if name is not None:
                self._model.set_attn_implementation(before)

    @torch.inference_mode()
    def touch_weights(self) -> None:
        """Read every weight once, so that weights mapped from a file are in memory."""
        for weight in self._model.parameters():
            weight.sum()

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], stop_at: int) -> None:
        """A causal pass that ends before the attention of layer `stop_at`; needs `PLAIN_ATTENTION`."""
        token = _stop_at.set(stop_at)
        try:
            self._model.base_model(input_ids=self._row(ids), use_cache=False)
        except _StopForward:
            pass
        finally:
            _stop_at.reset(token)

    @torch.inference_mode()
    def attentions(self, ids: Sequence[int], heads: Sequence[HeadId], source: Span) -> Tensor:
        """The rows of some heads out of the attention matrices of all, averaged over `source`; needs `eager`.

        Returns [n, T] on the processor, in the model's precision.
        """
        out = self._model.base_model(input_ids=self._row(ids), use_cache=False, output_attentions=True)
        rows = [out.attentions[layer][0, head, source.start : source.end].mean(0) for layer, head in heads]
        return torch.stack(rows).cpu()

    @torch.inference_mode()
    def yes_minus_no(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logit of " yes" minus that of " no" after each prompt; needs `PLAIN_ATTENTION`. [D] float32

        Batches of at most `PASS_TOKENS` tokens, of similar lengths, padded on the right: what follows a token cannot
        change it, so that no mask is needed. Only the two logits are computed. A cap of the logits, which keeps their
        order, is left out.
        """
        yes, no = self._model.get_output_embeddings().weight[self._yes_no].float()
        scores = torch.zeros(len(prompts))
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        while order:
            count = max(1, PASS_TOKENS // len(prompts[order[0]]))
            batch, order = order[:count], order[count:]
            rows = [torch.tensor(prompts[i], device=self.device) for i in batch]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            hidden = self._model.base_model(input_ids=padded, use_cache=False).last_hidden_state
            last = torch.tensor([len(row) - 1 for row in rows], device=self.device)
            ends = hidden[torch.arange(len(rows), device=self.device), last].float()
            scores[batch] = (ends @ (yes - no)).cpu()
        return scores

    def _row(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([ids], device=self.device)
