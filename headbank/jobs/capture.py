"""Capture: forward passes over calibration samples, one shard of per-document masses per sample.

Shards are named by the content of the sample and live in a folder named by everything else that shapes them, so a
stopped job continues where it was and a longer one reuses what is there. Selection reads shards only.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headbank.bank import FINGERPRINT_FIELDS, slug
from headbank.errors import BankError, InputTooLong, NonFiniteScore
from headbank.jobs.placements import placement_order, placement_positions
from headbank.models.base import Capture, HeadRunner
from headbank.numerics.spans import span_mass
from headbank.types import ModelInfo, PromptLayout, Sample, Span, View


@dataclass(frozen=True)
class CaptureConfig:
    """What shapes a shard besides the model and the sample."""

    placements: int
    """Number of places for the gold block (P)."""
    views: tuple[View, ...]
    seed: int = 0
    """Seeds the order of the distractors."""
    response_tokens: int = 16
    """Longest answer that the response view reads."""


@dataclass(frozen=True)
class Shard:
    """Attention of every head on every document of one sample, in every placement."""

    sample_id: str
    mass: dict[View, Tensor]
    """View -> [P, L, H, D] float32; documents in the order of the sample, whatever their place in the prompt."""
    reference: dict[View, Tensor]
    """View -> [P, L, H, 2] float32: mass on the prefix and on the tail, which every prompt has; kept so that scores
    against a reference need no second capture."""
    lengths: Tensor
    """Tokens of each document. [D] int64"""
    gold: Tensor
    """Which documents are gold. [D] bool"""
    prompt_tokens: int
    """Length of the prompt."""


def capture_folder(root: Path, info: ModelInfo, config: CaptureConfig) -> Path:
    """Folder of the shards of one model and configuration under a bank root."""
    described = {field: getattr(info, field) for field in FINGERPRINT_FIELDS}
    described |= {"dtype": info.dtype, "config": asdict(config), "format": 1}
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]
    return root / ".captures" / f"{slug(info.model_id)}-{key}"


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
            shards.append(_read(path, sample, config))
        else:
            rejected.setdefault(reason, []).append(sample.id)
        if on_sample is not None:
            on_sample(sample, reused)
    return shards, rejected


def _capture_one(runner: HeadRunner, sample: Sample, config: CaptureConfig, path: Path) -> str | None:
    """Capture one sample into `path`; the reason when it cannot be used."""
    if not sample.golds:
        return "no_gold"
    # One distractor at least: without one there is nothing to rank the golds above.
    if len(sample.distractors) < max(1, config.placements - 1):
        return "too_few_distractors"
    positions = placement_positions(len(sample.distractors), config.placements)
    orders = [placement_order(sample, position, config.seed) for position in positions]
    reserve = config.response_tokens if "response" in config.views else 0
    try:
        layouts = [
            runner.prompts.build(
                sample.question, [sample.documents[i].content for i in order], reserve_tokens=reserve
            )
            for order in orders
        ]
    except InputTooLong:
        return "too_long"
    # From the last placement to the first: each shares its leading distractors with the one before it.
    captures = runner.capture_many(layouts[::-1], views=config.views, max_new_tokens=config.response_tokens)[
        ::-1
    ]
    tensors = _tensors(runner.info, sample, orders, layouts, captures, config.views)
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
    views: Sequence[View],
) -> dict[str, Tensor]:
    place = {index: at for at, index in enumerate(orders[0])}
    spans = layouts[0].documents
    tensors = {
        "gold": torch.tensor([d.gold for d in sample.documents]),
        "lengths": torch.tensor([spans[place[i]].length for i in range(len(sample.documents))]),
        "prompt_tokens": torch.tensor(max(layout.length for layout in layouts)),
    }
    for view in views:
        masses, references = [], []
        for order, layout, capture in zip(orders, layouts, captures, strict=True):
            rows = capture.mass[view].reshape(info.n_layers, info.n_heads, -1)
            by_document = span_mass(rows, layout.documents)
            masses.append(by_document[..., torch.tensor(order).argsort()].float())
            outside = [Span(0, layout.prefix_end), Span(layout.tail_start, layout.length)]
            references.append(span_mass(rows, outside).float())
        tensors[f"{view}.mass"] = torch.stack(masses)
        tensors[f"{view}.reference"] = torch.stack(references)
    return tensors


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    part = path.with_suffix(f".part-{os.getpid()}")
    save_file({name: t.contiguous() for name, t in tensors.items()}, part)
    part.replace(path)


def _read(path: Path, sample: Sample, config: CaptureConfig) -> Shard:
    try:
        tensors = load_file(path)
        return Shard(
            sample.id,
            {view: tensors[f"{view}.mass"] for view in config.views},
            {view: tensors[f"{view}.reference"] for view in config.views},
            tensors["lengths"],
            tensors["gold"],
            int(tensors["prompt_tokens"]),
        )
    except Exception as error:
        raise BankError(f"{path}: damaged shard, delete it to capture the sample again ({error})") from error


def _content_hash(sample: Sample) -> str:
    content: list[Any] = [sample.id, sample.question, [[d.content, d.gold] for d in sample.documents]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
