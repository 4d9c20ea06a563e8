"""The transformers engine: reads heads in truncated packed passes, writes answers on the same keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headbank.errors import InputError, ModelError, UnsupportedModel
from headbank.models import arch
from headbank.models.base import Capture, CaptureRequest
from headbank.models.cache import DocumentCache
from headbank.models.graph import PromptGraph, chain
from headbank.models.packed import KeptRows, Node, Pass, Read, TokenMass, joined, passes
from headbank.models.prompt import PromptBuilder
from headbank.models.tap import tapping
from headbank.types import HeadId, ModelInfo, View

_PARITY_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}
"""How far a tapped head may be from eager attention (total variation); half-precision eager scores are coarse."""


@dataclass
class _Writing:
    """A response in the making."""

    limit: int
    """Most tokens to write."""
    read: tuple[dict[int, Tensor], int] | None
    """Heads by layer and the number of columns to keep of each written token's row; None reads nothing."""
    logits: Tensor
    """[V] after the last token."""
    end: int
    """Position of the next token."""
    context: list[Node]
    tokens: list[int] = field(default_factory=list)
    rows: list[TokenMass] = field(default_factory=list)
    """One per written token."""


class HFRunner:
    """Reads attention heads of a causal language model of transformers (loaded by `headbank.models.loading`)."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        model_id: str,
        revision: str = "",
        config: Any = None,
        documents: DocumentCache | None = None,
    ) -> None:
        """Take a loaded model.

        `config` is the configuration of the whole model, given when `model` may hold only its first layers.
        `documents` keeps the keys and values of `parallel` documents for later requests; None keeps none.
        """
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._documents = documents
        self.loaded_layers = len(arch.decoder_layers(model))
        """How many layers can be read, counted from the first; fewer than `info.n_layers` cannot write."""
        config = (config or model.config).get_text_config()
        self._prompts = PromptBuilder(tokenizer, arch.context_tokens(config))
        self._info = arch.describe(
            model,
            config,
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

    @property
    def documents(self) -> DocumentCache | None:
        """The cache of document keys and values."""
        return self._documents

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def capture(self, request: CaptureRequest) -> Capture:
        """Read heads over one prompt (see `headbank.models.base.HeadRunner.capture_many`)."""
        return self.capture_many([request])[0]

    @torch.inference_mode()
    def capture_many(self, requests: Sequence[CaptureRequest]) -> list[Capture]:
        """Read heads over several prompts, packed (see `headbank.models.base.HeadRunner.capture_many`)."""
        chosen = [self._every_head() if r.heads is None else r.heads for r in requests]
        by_layer = [self._by_layer(heads) for heads in chosen]
        writes = ["response" in request.views for request in requests]
        for request, written in zip(requests, writes, strict=True):
            if written and request.max_new_tokens < 1:
                raise InputError("max_new_tokens", "must be at least 1", 1)
        if any(writes) and self.loaded_layers < self.info.n_layers:
            raise InputError("views", f"response needs the whole model; {self._part()}")
        stop_at = None if any(writes) else max((max(layers) for layers in by_layer), default=0)
        graph = PromptGraph(self._documents, self.info.n_layers if stop_at is None else stop_at + 1)
        totals = [TokenMass(request.layout.length) for request in requests]
        tails = [
            graph.add(request.layout, heads if "query" in request.views else {}, total, written)
            for request, heads, total, written in zip(requests, by_layer, totals, writes, strict=True)
        ]
        self._run(graph.nodes, stop_at)
        graph.remember()
        writings = {
            i: _Writing(
                request.max_new_tokens,
                (by_layer[i], request.layout.length),
                _logits(tails[i]),
                request.layout.tail_position + request.layout.length - request.layout.tail_start,
                [*tails[i].context, tails[i]],
            )
            for i, request in enumerate(requests)
            if writes[i]
        }
        self._write(list(writings.values()))
        return [
            self._capture(request, chosen[i], by_layer[i], totals[i], writings.get(i))
            for i, request in enumerate(requests)
        ]

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        """Greedy continuation (see `headbank.models.base.HeadRunner.generate`).

        Raises ModelError when only the first layers of the model were loaded.
        """
        if self.loaded_layers < self.info.n_layers:
            raise ModelError(f"{self.info.model_id}: writing needs the whole model; {self._part()}")
        nodes = chain(tuple(ids), 0, ())
        nodes[-1].wants_logits = True
        for node in nodes:
            node.keep = True
        self._run(nodes, None)
        writing = _Writing(max_new_tokens, None, _logits(nodes[-1]), len(ids), nodes)
        self._write([writing])
        return tuple(writing.tokens)

    def _capture(
        self,
        request: CaptureRequest,
        chosen: tuple[HeadId, ...],
        by_layer: dict[int, Tensor],
        total: TokenMass,
        writing: _Writing | None,
    ) -> Capture:
        layout = request.layout
        mass: dict[View, Tensor] = {}
        source: dict[View, tuple[int, ...]] = {}
        if "query" in request.views:
            rows = self._rows(total, chosen, by_layer)
            mass["query"] = rows / max(1, layout.query.length)
            source["query"] = tuple(range(*layout.query))
        if writing is None:
            return Capture(chosen, mass, source)
        steps = torch.stack([self._rows(step, chosen, by_layer) for step in writing.rows])
        mass["response"] = steps.mean(0)
        source["response"] = tuple(range(layout.length, layout.length + len(steps)))
        return Capture(chosen, mass, source, tuple(writing.tokens), steps)

    def _write(self, writings: Sequence[_Writing]) -> None:
        """Write greedily, all responses in step, and read the row of every written token.

        A response that is read has at least one token, so that there is a row.
        """
        for writing in writings:
            writing.context = [Node((), 0, keep=True, computed=joined(writing.context)), *writing.context]
        for writing in writings:
            # The joined copy is enough; stretches that several responses share are dropped once all are joined.
            for node in writing.context[1:]:
                node.computed = None
            del writing.context[1:]
        alive = list(writings)
        while alive:
            nodes: dict[Node, _Writing] = {}
            for writing in alive:
                if writing.read is not None and not writing.tokens:
                    writing.logits[list(self._stops)] = -torch.inf
                token = int(writing.logits.argmax())
                if len(writing.tokens) == writing.limit or token in self._stops:
                    continue
                node = Node((token,), writing.end, tuple(writing.context), keep=True)
                writing.tokens.append(token)
                if writing.read is not None:
                    writing.rows.append(TokenMass(writing.read[1]))
                    node.read = Read(writing.read[0], torch.tensor([0]), writing.rows[-1])
                node.wants_logits = len(writing.tokens) < writing.limit
                if node.wants_logits or node.read is not None:
                    nodes[node] = writing
            alive = list(nodes.values())
            if not alive:
                return
            last = not any(node.wants_logits for node in nodes)
            # Nothing is written after the last token, so the layers above the deepest head are not needed.
            stop_at = max(max(w.read[0]) for w in alive if w.read is not None) if last else None
            self._run(list(nodes), stop_at)
            for node, writing in nodes.items():
                writing.context.append(node)
                writing.end += 1
                if node.wants_logits:
                    writing.logits = _logits(node)
            alive = [writing for node, writing in nodes.items() if node.wants_logits]

    def _run(self, nodes: Sequence[Node], stop_at: int | None) -> None:
        """Compute nodes, contexts before those who see them; nothing after the queries and keys of `stop_at`."""
        for batch, kept, spent in passes(nodes):
            packed = Pass(batch, kept, stop_at, self._model.device)
            last = packed.last_tokens()
            with tapping(packed, self.info.windows):
                inputs = {"input_ids": packed.tokens, "position_ids": packed.positions, "use_cache": False}
                if len(last):
                    logits = self._model(**inputs, logits_to_keep=last).logits[0].float()
                    wanted = (node for node in batch if node.wants_logits)
                    for node, row in zip(wanted, logits, strict=True):
                        node.logits = row
                else:
                    self._model.base_model(**inputs)
            packed.finish()
            for node in spent:
                node.computed = None

    def _rows(self, total: TokenMass, chosen: tuple[HeadId, ...], by_layer: dict[int, Tensor]) -> Tensor:
        """Summed rows of the chosen heads in their order, [n, T]; zeros when there was no source row."""
        if not total.totals:
            dtype = torch.promote_types(self._model.dtype, torch.float32)
            return torch.zeros(len(chosen), total.n_tokens, dtype=dtype)
        place = {
            HeadId(layer, int(head)): (layer, row)
            for layer, heads in by_layer.items()
            for row, head in enumerate(heads)
        }
        rows = [total.totals[layer][row] for layer, row in (place[head] for head in chosen)]
        return torch.stack(rows).cpu()

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
            if head.layer >= self.loaded_layers:
                raise InputError("heads", f"{head} cannot be read; {self._part()}", self.loaded_layers)
        layers = sorted({head.layer for head in heads})
        return {
            layer: torch.tensor(
                sorted({h.head for h in heads if h.layer == layer}), device=self._model.device
            )
            for layer in layers
        }

    def _part(self) -> str:
        return f"only the first {self.loaded_layers} of its {self.info.n_layers} layers were loaded"

    def _stop_ids(self) -> frozenset[int]:
        generation = getattr(self._model, "generation_config", None)
        configured = getattr(generation, "eos_token_id", None)
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
        if len(differences) != self.loaded_layers:
            raise UnsupportedModel(f"{kind}: some layers' attention cannot be read")
        for layer, difference in enumerate(differences):
            # NaN is refused too.
            if not difference <= _PARITY_TOLERANCE[self._model.dtype]:
                raise UnsupportedModel(
                    f"{kind}: tapped rows differ from eager attention by {difference:.2g} in layer {layer}"
                )

    def _parity(self) -> list[float]:
        """Per layer, how far the tap, on top of a context, is from eager attention (worst head's total variation)."""
        half = 16
        config = self._model.config
        ids = [token % config.get_text_config().vocab_size for token in range(1, 2 * half + 1)]
        heads = {layer: torch.arange(self.info.n_heads) for layer in range(self.loaded_layers)}
        found = KeptRows()
        before = Node(tuple(ids[:half]), 0)
        after = Node(tuple(ids[half:]), half, (before,), read=Read(heads, torch.arange(half), found))
        self._run([before, after], None)
        name = config._attn_implementation
        tokens = torch.tensor([ids], device=self._model.device)
        try:
            self._model.set_attn_implementation("eager")
            out = self._model.base_model(input_ids=tokens, use_cache=False, output_attentions=True)
        finally:
            self._model.set_attn_implementation(name)
        return [
            float(((found.rows(layer) - rows[0, :, half:]).abs().sum(-1) / 2).mean(-1).max())
            for layer, rows in enumerate(out.attentions)
        ]


def _logits(node: Node) -> Tensor:
    assert node.logits is not None, "the pass ended before the logits"
    return node.logits
