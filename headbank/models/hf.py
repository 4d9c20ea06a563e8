"""The transformers engine: reads heads in one truncated prefill, writes answers on the same cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from headbank.errors import InputError, UnsupportedModel
from headbank.models import arch
from headbank.models.base import Capture
from headbank.models.prompt import PromptBuilder
from headbank.models.tap import RowStore, Tap, TokenMass, tapping
from headbank.types import HeadId, ModelInfo, PromptLayout, View

PREFILL_TOKENS = 2048
"""Documents are computed in steps of this many tokens, which bounds the memory of masks and activations."""

_PARITY_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}
"""How far a tapped head may be from eager attention (total variation); half-precision eager scores are coarse."""


def _crop(cache: DynamicCache, n_tokens: int) -> None:
    """Keep the first tokens of every layer; layers that an early stop left out hold fewer, or none."""
    for layer in cache.layers:
        layer.crop(min(0, n_tokens - layer.get_seq_length()))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


class HFRunner:
    """Reads attention heads of a causal language model of transformers (loaded by `headbank.models.loading`)."""

    def __init__(self, model: Any, tokenizer: Any, *, model_id: str, revision: str = "") -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        arch.decoder_layers(model)
        config = model.config.get_text_config()
        self._prompts = PromptBuilder(tokenizer, arch.context_tokens(config))
        self._info = arch.describe(
            model,
            tokenizer,
            model_id=model_id,
            revision=revision,
            template_hash=self._prompts.template_hash,
        )
        self._stops = self._stop_ids()
        if config.model_type not in arch.TESTED_FAMILIES:
            self._check_parity()

    @property
    def info(self) -> ModelInfo:
        """Identity and shape of the model."""
        return self._info

    @property
    def prompts(self) -> PromptBuilder:
        """The prompt builder of this model."""
        return self._prompts

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def capture(
        self,
        layout: PromptLayout,
        *,
        heads: Sequence[HeadId] | None = None,
        views: Sequence[View] = ("query",),
        max_new_tokens: int = 16,
    ) -> Capture:
        """Read heads over one prompt (see `headbank.models.base.HeadRunner.capture`)."""
        return self.capture_many([layout], heads=heads, views=views, max_new_tokens=max_new_tokens)[0]

    @torch.inference_mode()
    def capture_many(
        self,
        layouts: Sequence[PromptLayout],
        *,
        heads: Sequence[HeadId] | None = None,
        views: Sequence[View] = ("query",),
        max_new_tokens: int = 16,
    ) -> list[Capture]:
        """Captures over several prompts; what a prompt shares with the one before it is computed once."""
        if "response" in views and max_new_tokens < 1:
            raise InputError("max_new_tokens", "must be at least 1", 1)
        chosen = self._every_head() if heads is None else tuple(heads)
        by_layer = self._by_layer(chosen)
        stop_at = None if "response" in views else max(by_layer)
        cache = DynamicCache()
        seen: tuple[int, ...] = ()
        captures = []
        for layout in layouts:
            kept = min(_common_prefix(seen, layout.ids), layout.tail_start)
            _crop(cache, kept)
            self._prefill(layout.ids[kept : layout.tail_start], cache, stop_at)
            capture = self._capture_tail(layout, chosen, by_layer, views, max_new_tokens, cache, stop_at)
            # The last token of a response may have stopped early, so it is not shared.
            seen = layout.ids + capture.response[:-1]
            captures.append(capture)
        return captures

    def _capture_tail(
        self,
        layout: PromptLayout,
        chosen: tuple[HeadId, ...],
        by_layer: dict[int, Tensor],
        views: Sequence[View],
        max_new_tokens: int,
        cache: DynamicCache,
        stop_at: int | None,
    ) -> Capture:
        mass: dict[View, Tensor] = {}
        source: dict[View, tuple[int, ...]] = {}
        query_rows = torch.arange(layout.query.start, layout.query.end)
        reads_query = "query" in views and len(query_rows) > 0
        total = TokenMass(layout.length)
        tap = Tap(by_layer if reads_query else {}, query_rows - layout.tail_start, total, stop_at)
        logits = self._forward(layout.ids[layout.tail_start :], cache, tap, with_logits=stop_at is None)
        if "query" in views:
            mass["query"] = self._mean(total, chosen, by_layer, len(query_rows))
            source["query"] = tuple(query_rows.tolist())
        response: tuple[int, ...] = ()
        if "response" in views:
            assert logits is not None
            total = TokenMass(layout.length)
            response = self._write(logits, by_layer, total, cache, max_new_tokens)
            mass["response"] = self._mean(total, chosen, by_layer, len(response))
            source["response"] = tuple(range(layout.length, layout.length + len(response)))
        return Capture(chosen, mass, source, response)

    def _write(
        self, logits: Tensor, by_layer: dict[int, Tensor], total: TokenMass, cache: DynamicCache, limit: int
    ) -> tuple[int, ...]:
        """Write greedily and read the row of every written token; at least one token, so that there is a row."""
        response: list[int] = []
        for step in range(limit):
            if step == 0:
                logits[list(self._stops)] = -torch.inf
            token = int(logits.argmax())
            if token in self._stops:
                break
            response.append(token)
            tap = Tap(by_layer, torch.tensor([0]), total)
            last = step == limit - 1
            if last:
                # Nothing is written after this token, so the layers above the deepest head are not needed.
                tap.stop_at = max(by_layer)
            following = self._forward((token,), cache, tap, with_logits=not last)
            if following is None:
                break
            logits = following
        return tuple(response)

    def _prefill(self, ids: Sequence[int], cache: DynamicCache, stop_at: int | None) -> None:
        for start in range(0, len(ids), PREFILL_TOKENS):
            tap = Tap({}, torch.tensor([], dtype=torch.long), RowStore(), stop_at)
            self._forward(ids[start : start + PREFILL_TOKENS], cache, tap, with_logits=False)

    def _forward(
        self, ids: Sequence[int], cache: DynamicCache, tap: Tap, *, with_logits: bool
    ) -> Tensor | None:
        """One pass over new tokens; logits [V] float32 of the last one, or None where they are not wanted."""
        tokens = torch.tensor([list(ids)], device=self._model.device)
        logits = None
        with tapping(tap):
            if with_logits:
                out = self._model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1)
                logits = out.logits[0, -1].float()
            else:
                self._model.base_model(input_ids=tokens, cache=cache, use_cache=True)
        return logits

    def _mean(
        self, total: TokenMass, chosen: tuple[HeadId, ...], by_layer: dict[int, Tensor], n_rows: int
    ) -> Tensor:
        """Mean rows of the chosen heads in their order, [n, T]; zeros when there was no source row."""
        if n_rows == 0:
            dtype = torch.promote_types(self._model.dtype, torch.float32)
            return torch.zeros(len(chosen), total.n_tokens, dtype=dtype)
        place = {
            HeadId(layer, int(head)): (layer, row)
            for layer, heads in by_layer.items()
            for row, head in enumerate(heads)
        }
        rows = [total.totals[layer][0, row] for layer, row in (place[head] for head in chosen)]
        return torch.stack(rows).cpu() / n_rows

    def _every_head(self) -> tuple[HeadId, ...]:
        return tuple(
            HeadId(layer, head) for layer in range(self.info.n_layers) for head in range(self.info.n_heads)
        )

    def _by_layer(self, heads: Sequence[HeadId]) -> dict[int, Tensor]:
        if not heads:
            raise InputError("heads", "needs at least one head", 1)
        for head in heads:
            if not (0 <= head.layer < self.info.n_layers and 0 <= head.head < self.info.n_heads):
                raise InputError(
                    "heads", f"{head} is outside {self.info.n_layers} x {self.info.n_heads} heads"
                )
        layers = sorted({head.layer for head in heads})
        return {
            layer: torch.tensor(
                sorted({h.head for h in heads if h.layer == layer}), device=self._model.device
            )
            for layer in layers
        }

    def _stop_ids(self) -> frozenset[int]:
        configured = getattr(self._model.generation_config, "eos_token_id", None)
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(int(i) for i in [*ids, self._tokenizer.eos_token_id] if i is not None)

    @torch.inference_mode()
    def _check_parity(self) -> None:
        """Compare the tap with eager attention on a short text. Raises UnsupportedModel when they differ."""
        kind = self._model.config.get_text_config().model_type
        try:
            differences = self._parity()
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"{kind}: attention cannot be read ({type(error).__name__})") from error
        if len(differences) != self.info.n_layers:
            raise UnsupportedModel(f"{kind}: some layers' attention cannot be read")
        for layer, difference in enumerate(differences):
            # NaN is refused too.
            if not difference <= _PARITY_TOLERANCE[self._model.dtype]:
                raise UnsupportedModel(
                    f"{kind}: tapped rows differ from eager attention by {difference:.2g} in layer {layer}"
                )

    def _parity(self) -> list[float]:
        """Per layer, how far the tap, on top of a cache, is from eager attention: the worst head's total variation."""
        half = 16
        config = self._model.config
        ids = [token % config.get_text_config().vocab_size for token in range(1, 2 * half + 1)]
        cache, store = DynamicCache(), RowStore()
        heads = {layer: torch.arange(self.info.n_heads) for layer in range(self.info.n_layers)}
        self._prefill(ids[:half], cache, None)
        self._forward(ids[half:], cache, Tap(heads, torch.arange(half), store), with_logits=False)
        name = config._attn_implementation
        tokens = torch.tensor([ids], device=self._model.device)
        try:
            self._model.set_attn_implementation("eager")
            out = self._model.base_model(input_ids=tokens, use_cache=False, output_attentions=True)
        finally:
            self._model.set_attn_implementation(name)
        return [
            float(((store.rows(layer) - rows[:, :, half:]).abs().sum(-1) / 2).mean(-1).max())
            for layer, rows in enumerate(out.attentions)
        ]
