"""Capture: forward passes over samples, one shard of per-document masses per sample.

Shards are named by the content of the sample and live in a folder named by everything else that shapes them, so a
stopped job continues where it was and a longer one reuses what is there. Selection and offline evaluation read shards
only.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headbank.bank import FINGERPRINT_FIELDS, slug
from headbank.errors import BankError, InputTooLong, NonFiniteScore
from headbank.jobs.placements import placement_order, placement_positions
from headbank.models.base import NULL_QUERY, Capture, CaptureRequest, HeadRunner
from headbank.numerics.spans import span_mass
from headbank.types import JOINT, ModelInfo, PromptLayout, PromptStyle, Sample, Span, View

TOKEN_SCALE = 1024.0
"""Token masses are kept as float16 of this multiple, exact to 0.05 % from 6e-8 up to 1."""

AS_GIVEN = 0
"""`placements` of samples whose documents stay in the order of the file."""


@dataclass(frozen=True)
class CaptureConfig:
    """What shapes a shard besides the model and the sample."""

    placements: int
    """Number of places for the gold block (P), or `AS_GIVEN`; `parallel` needs no more than that."""
    views: tuple[View, ...]
    style: PromptStyle = JOINT
    seed: int = 0
    """Seeds the order of the distractors."""
    response_tokens: int = 16
    """Longest answer that the response view reads."""


@dataclass(frozen=True)
class Attention:
    """What all heads give to the documents of one sample, from one kind of source rows."""

    mass: Tensor
    """[P, L, H, D] float32; documents in the order of the sample, whatever their place in the prompt."""
    reference: Tensor
    """[P, L, H] float32: mass on the prefix and the tail, which every prompt has."""


@dataclass(frozen=True)
class Shard:
    """Attention of every head on every document of one sample, in every placement."""

    sample_id: str
    tensors: dict[str, Tensor]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each document. [D] int64"""
        return self.tensors["lengths"]

    @property
    def relevance(self) -> Tensor:
        """Grade of each document, 0 for a distractor. [D] int64"""
        return self.tensors["relevance"]

    @property
    def gold(self) -> Tensor:
        """Which documents are gold. [D] bool"""
        return self.relevance > 0

    @property
    def prompt_tokens(self) -> int:
        """The last position that a source row of the query stands at, plus one."""
        return int(self.tensors["prompt_tokens"])

    def attention(self, view: View, response_tokens: int | None = None) -> Attention:
        """Attention from the rows of a view; of the first `response_tokens` written tokens, None: of all."""
        mass, reference = self.tensors[f"{view}.mass"], self.tensors[f"{view}.reference"]
        if view == "response":
            steps = self.tensors["response.steps"]
            if response_tokens is not None:
                steps = steps.clamp(max=response_tokens)
            mask = torch.arange(mass.shape[1]) < steps[:, None]  # [P, S]
            mass = (mass * mask[..., None, None, None]).sum(1) / steps[:, None, None, None]
            reference = (reference * mask[..., None, None]).sum(1) / steps[:, None, None]
        return Attention(mass, reference)

    @property
    def null(self) -> Attention:
        """Attention from the rows of the content-free query."""
        return Attention(self.tensors["null.mass"], self.tensors["null.reference"])

    def token_mass(self, source: Literal["query", "null"], at: Any = ...) -> Tensor:
        """Attention on every document token, documents in the sample's order.

        `at` indexes [P, L, H], by default all of it. [..., sum of lengths] float32
        """
        return self.tensors[f"{source}.tokens"][at].float() / TOKEN_SCALE

    @property
    def token_ids(self) -> Tensor:
        """The document tokens themselves, as `token_mass` has them. int64"""
        return self.tensors["token_ids"]

    @property
    def query_ids(self) -> Tensor:
        """The tokens of the question. int64"""
        return self.tensors["query_ids"]


def capture_folder(root: Path, info: ModelInfo, config: CaptureConfig) -> Path:
    """Folder of the shards of one model and configuration under a bank root."""
    described = {field: getattr(info, field) for field in FINGERPRINT_FIELDS}
    described |= {"dtype": info.dtype, "config": asdict(config), "format": 2}
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]
    return root / ".captures" / f"{slug(info.model_id)}-{config.style}-{key}"


def all_placements(samples: Sequence[Sample]) -> int:
    """m + 1 for the most frequent number of distractors m."""
    counts = Counter(len(sample.distractors) for sample in samples)
    return max(counts, key=lambda m: (counts[m], m)) + 1


def capture_samples(
    runner: HeadRunner,
    samples: Sequence[Sample],
    config: CaptureConfig,
    folder: Path,
    on_sample: Callable[[Sample, bool], None] | None = None,
) -> tuple[list[Shard], dict[str, list[str]]]:
    """Shards of the usable samples in their order, and the ids of the others by reason.

    Reasons: `no_gold`, `too_few_distractors` (for the number of placements), `too_long` (for the context).
    `on_sample(sample, reused)` is called after each sample. Raises BankError for a damaged shard,
    NonFiniteScore when the model's attention is not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[Shard] = []
    rejected: dict[str, list[str]] = {}
    for sample in samples:
        path = folder / f"{_content_hash(sample)}.safetensors"
        reused = path.exists()
        reason = None if reused else _capture_one(runner, sample, config, path)
        if reason is None:
            shards.append(_read(path, sample))
        else:
            rejected.setdefault(reason, []).append(sample.id)
        if on_sample is not None:
            on_sample(sample, reused)
    return shards, rejected


def _orders(sample: Sample, config: CaptureConfig) -> list[tuple[int, ...]]:
    if config.placements == AS_GIVEN:
        return [tuple(range(len(sample.documents)))]
    positions = placement_positions(len(sample.distractors), config.placements)
    return [placement_order(sample, position, config.seed) for position in positions]


def _capture_one(runner: HeadRunner, sample: Sample, config: CaptureConfig, path: Path) -> str | None:
    """Capture one sample into `path`; the reason when it cannot be used."""
    if not any(document.relevance for document in sample.documents):
        return "no_gold"
    if len(sample.distractors) < max(1, config.placements - 1):
        return "too_few_distractors"
    orders = _orders(sample, config)
    texts = [[sample.documents[i].content for i in order] for order in orders]
    reserve = config.response_tokens if "response" in config.views else 0
    try:
        asked, null = (
            [
                runner.prompts.build(query, documents, style=config.style, reserve_tokens=reserve)
                for documents in texts
            ]
            for query in (sample.question, NULL_QUERY)
        )
    except InputTooLong:
        return "too_long"
    requests = [CaptureRequest(layout, None, config.views, config.response_tokens) for layout in asked]
    requests += [CaptureRequest(layout) for layout in null]
    captures = runner.capture_many(requests)
    tensors = _tensors(runner.info, sample, orders, asked, captures[: len(asked)], config)
    nulls = [(o, n, c.mass["query"]) for o, n, c in zip(orders, null, captures[len(asked) :], strict=True)]
    tensors |= _masses("null", runner.info, nulls) | _token_masses("null", runner.info, nulls)
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise NonFiniteScore(f"sample {sample.id}: attention is not finite; try another dtype")
    _save(path, tensors)
    return None


def _tensors(
    info: ModelInfo,
    sample: Sample,
    orders: Sequence[Sequence[int]],
    layouts: Sequence[PromptLayout],
    captures: Sequence[Capture],
    config: CaptureConfig,
) -> dict[str, Tensor]:
    place = {index: at for at, index in enumerate(orders[0])}
    spans = layouts[0].documents
    tail = max(layout.tail_position + layout.length - layout.tail_start for layout in layouts)
    tensors = {
        "token_ids": torch.tensor(
            [i for at in range(len(spans)) for i in _document_ids(layouts[0], place[at])]
        ),
        "query_ids": torch.tensor(layouts[0].ids[slice(*layouts[0].query)]),
        "relevance": torch.tensor([d.relevance for d in sample.documents]),
        "lengths": torch.tensor([spans[place[i]].length for i in range(len(sample.documents))]),
        "prompt_tokens": torch.tensor(tail),
    }
    groups = list(zip(orders, layouts, captures, strict=True))
    if "query" in config.views:
        asked = [(o, layout, c.mass["query"]) for o, layout, c in groups]
        tensors |= _masses("query", info, asked) | _token_masses("query", info, asked)
    if "response" in config.views:
        steps = [c.steps for c in captures if c.steps is not None]
        limit = config.response_tokens
        padded = [torch.cat([s, s.new_zeros(limit - len(s), *s.shape[1:])]) for s in steps]
        rows = [(o, layout, s) for (o, layout, _), s in zip(groups, padded, strict=True)]
        tensors |= _masses("response", info, rows)
        tensors["response.steps"] = torch.tensor([len(s) for s in steps])
        ids = [[*c.response, *[-1] * (limit - len(c.response))] for c in captures]
        tensors["response.ids"] = torch.tensor(ids)
    return tensors


def _masses(
    name: str, info: ModelInfo, groups: Sequence[tuple[Sequence[int], PromptLayout, Tensor]]
) -> dict[str, Tensor]:
    """Mass per document and on the reference tokens, from rows [..., L * H, T] of every placement."""
    masses, references = [], []
    for order, layout, rows in groups:
        rows = rows.reshape(*rows.shape[:-2], info.n_layers, info.n_heads, rows.shape[-1])
        masses.append(span_mass(rows, layout.documents)[..., torch.tensor(order).argsort()].float())
        outside = [Span(0, layout.prefix_end), Span(layout.tail_start, layout.length)]
        references.append(span_mass(rows, outside).sum(-1).float())
    return {f"{name}.mass": torch.stack(masses), f"{name}.reference": torch.stack(references)}


def _token_masses(
    name: str, info: ModelInfo, groups: Sequence[tuple[Sequence[int], PromptLayout, Tensor]]
) -> dict[str, Tensor]:
    """Mass on every document token, documents in the order of the sample, from rows [L * H, T] of every placement."""
    found = []
    for order, layout, rows in groups:
        spans = [layout.documents[at] for at in torch.tensor(order).argsort().tolist()]
        of_documents = torch.cat([rows[:, span.start : span.end] for span in spans], dim=1)
        found.append(of_documents.reshape(info.n_layers, info.n_heads, -1))
    return {f"{name}.tokens": (torch.stack(found) * TOKEN_SCALE).to(torch.float16)}


def _document_ids(layout: PromptLayout, at: int) -> tuple[int, ...]:
    span = layout.documents[at]
    return layout.ids[span.start : span.end]


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    part = path.with_suffix(f".part-{os.getpid()}")
    save_file({name: t.contiguous() for name, t in tensors.items()}, part)
    part.replace(path)


def _read(path: Path, sample: Sample) -> Shard:
    try:
        return Shard(sample.id, load_file(path))
    except Exception as error:
        raise BankError(f"{path}: damaged shard, delete it to capture the sample again ({error})") from error


def _content_hash(sample: Sample) -> str:
    content: list[Any] = [sample.id, sample.question, [[d.content, d.relevance] for d in sample.documents]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
