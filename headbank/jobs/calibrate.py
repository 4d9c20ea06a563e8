"""The calibration job: samples -> shards -> head sets, the best of them by default -> bank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headbank.bank import MANIFEST, Bank, check, read, slug, write
from headbank.errors import BankError, BankMismatch, DataError, InputError
from headbank.jobs.capture import (
    AS_GIVEN,
    CaptureConfig,
    Shard,
    all_placements,
    capture_folder,
    capture_samples,
)
from headbank.jobs.curves import layer_curve, response_curve
from headbank.jobs.detect import DETECTORS, Problem, SelectConfig
from headbank.jobs.select import Selected, describe, fuse, select
from headbank.jobs.statistics import ViewStatistics, view_statistics
from headbank.models.base import HeadRunner
from headbank.types import Fusion, ModelInfo, PromptStyle, Sample, View

Voter = Callable[[Sample], Tensor]
"""Another ranker's raw scores of a sample's documents, [D] float64."""

DEFAULT_SELECTION = SelectConfig()
DEFAULT_STYLES = (PromptStyle("joint"), PromptStyle("parallel"))


@dataclass(frozen=True)
class CalibrateConfig:
    """What the job does."""

    styles: tuple[PromptStyle, ...] = DEFAULT_STYLES
    """At most one per layout."""
    views: tuple[View, ...] = ("query", "response")
    placements: int | None = None
    """Of the golds in `joint`; None: all of them."""
    detectors: tuple[str, ...] = tuple(DETECTORS)
    seed: int = 0
    response_tokens: int = 16
    selection: SelectConfig = DEFAULT_SELECTION
    curves: bool = True
    """Also measure how much layers and written tokens matter."""


DEFAULT_CONFIG = CalibrateConfig()


@dataclass(frozen=True)
class Calibration:
    """What a finished job leaves."""

    folder: Path
    bank: Bank
    used: int
    rejected: dict[str, list[str]]


@dataclass
class _Found:
    """What selection found over all views and styles."""

    selected: dict[str, Selected]
    fusions: dict[str, Fusion]
    training: dict[str, Any]


def calibrate(
    runner: HeadRunner,
    samples: Sequence[Sample],
    root: Path,
    *,
    data_name: str,
    data_hash: str,
    config: CalibrateConfig = DEFAULT_CONFIG,
    voters: Mapping[str, Voter] | None = None,
    dense_model: str = "",
    captures: Path | None = None,
    on_sample: Callable[[Sample, bool], None] | None = None,
) -> Calibration:
    """Find a model's head sets and write its bank under `root`; shards go to `captures`, by default beside it.

    For each view the default is the set with the highest cross-validated MAP over all styles and detectors. A job
    that was stopped continues when it is called again with the same arguments, and writes the same bytes. Raises
    DataError when samples of fewer than two questions can be used, InputError as `check_samples` does, BankError
    when the bank's folder holds the bank of another model, NonFiniteScore when the model's attention is not finite.
    """
    check_samples(samples, data_name, config)
    _refuse_to_replace(root, runner.info)
    voters = {name: cache(voter) for name, voter in (voters or {}).items()}
    by_id = {sample.id: sample for sample in samples}
    found = _Found({}, {}, {"choice": {view: [] for view in config.views}})
    rejected: dict[str, list[str]] = {}
    used: set[str] = set()
    for style in config.styles:
        placements = _placements(samples, style, config)
        capture = CaptureConfig(placements, config.views, style, config.seed, config.response_tokens)
        folder = capture_folder(captures or root, runner.info, capture)
        shards, refused = capture_samples(runner, samples, capture, folder, on_sample)
        for reason, ids in refused.items():
            rejected.setdefault(reason, []).extend(i for i in ids if i not in rejected.get(reason, []))
        usable = [by_id[shard.sample_id] for shard in shards]
        _check_usable(usable, len(samples), refused, data_name)
        used.update(sample.id for sample in usable)
        scores = {name: [voter(sample) for sample in usable] for name, voter in voters.items()}
        for view in config.views:
            _select_view(runner.info, shards, view, style, config, scores, dense_model, found)
    bank = Bank(
        info=runner.info,
        head_sets={name: s.head_set for name, s in found.selected.items() if s.head_set.detector != "icr"},
        fusions=found.fusions,
        defaults={view: _default(found, view) for view in config.views},
        maps={name: value for s in found.selected.values() for name, value in s.maps.items()},
        training=found.training
        | {
            "data": data_name,
            "data_sha256": data_hash,
            "sample_ids": [sample.id for sample in samples if sample.id in used],
            "rejected": rejected,
        }
        | _settings(samples, config),
    )
    return Calibration(write(bank, root), bank, len(used), rejected)


def check_samples(samples: Sequence[Sample], data_name: str, config: CalibrateConfig) -> None:
    """Refuse what can be refused before a model is loaded.

    Raises DataError for ids that repeat and for fewer than two questions with a gold document and a distractor,
    InputError (field `placements`) where fewer than two have the distractors that the placements need.
    """
    if len({sample.id for sample in samples}) < len(samples):
        raise DataError(data_name, "two samples have the same id")
    distractors: dict[str, int] = {}
    for sample in samples:
        if sample.distractors and any(document.relevance for document in sample.documents):
            distractors[sample.question] = max(distractors.get(sample.question, 0), len(sample.distractors))
    if len(distractors) < 2:
        raise DataError(
            data_name,
            f"{len(distractors)} questions have a gold document and a distractor, calibration needs at least 2",
        )
    most = sorted(distractors.values())[-2] + 1
    asked = max(_placements(samples, style, config) for style in config.styles)
    if asked > most:
        raise InputError("placements", f"are {asked}, at least two questions allow only up to {most}", most)


def _check_usable(
    usable: Sequence[Sample], given: int, refused: Mapping[str, Sequence[str]], data_name: str
) -> None:
    if len({sample.question for sample in usable}) < 2:
        reasons = ", ".join(f"{reason}: {len(ids)}" for reason, ids in sorted(refused.items()))
        raise DataError(
            data_name,
            f"{len(usable)} of {given} samples can be used, calibration needs samples of at least 2 questions "
            f"({reasons})",
        )


def _settings(samples: Sequence[Sample], config: CalibrateConfig) -> dict[str, Any]:
    """The part of the training record that the caller chose."""
    return {
        "views": list(config.views),
        "styles": [asdict(style) for style in config.styles],
        "placements": {
            style.layout: _placements(samples, style, config) or "as given" for style in config.styles
        },
        "response_tokens": config.response_tokens,
        "seed": config.seed,
        "selection": describe(config.selection),
        "versions": {name: version(name) for name in ("headrank", "torch", "transformers")},
    }


def _placements(samples: Sequence[Sample], style: PromptStyle, config: CalibrateConfig) -> int:
    if style.layout == "parallel":
        return AS_GIVEN
    return config.placements or all_placements(samples)


def _select_view(
    info: ModelInfo,
    shards: Sequence[Shard],
    view: View,
    style: PromptStyle,
    config: CalibrateConfig,
    voters: Mapping[str, Sequence[Tensor]],
    dense_model: str,
    found: _Found,
) -> None:
    """All detectors of one view and style, the fusion of the best, and the curves of the training record."""
    selection = config.selection
    tokens = config.response_tokens if view == "response" else None
    eligible = eligible_layers(info, shards, tokens or 0, selection.max_layer)
    problem = Problem(_statistics(shards, view, style, tokens, selection), selection, eligible)
    rows = found.training["choice"][view]
    best: Selected | None = None
    precision = -1.0
    for detector in config.detectors:
        chosen = select(problem, detector)
        found.selected[chosen.head_set.name] = chosen
        metrics = chosen.metrics
        rows.append({"name": chosen.head_set.name, "style": str(style), **metrics})
        if chosen.counts:
            found.training.setdefault("counts", {})[problem.name("expert")] = chosen.counts
        # Fusion weighs a set's evidence, whatever the set's own rule is.
        by_evidence = float(np.mean(chosen.held_out.values["evidence"]["MAP"]))
        if detector != "icr" and by_evidence > precision:
            best, precision = chosen, by_evidence
    assert best is not None, "icr alone makes no bank"
    if voters:
        fusion = fuse(problem, best.head_set, best.held_out.z, voters, dense_model)
        found.fusions[fusion.name] = fusion
    if config.curves:
        curves = found.training.setdefault("curves", {})
        curves[problem.name("layers")] = layer_curve(problem)
        if view == "response":
            curves[problem.name("tokens")] = response_curve(problem)


def _statistics(
    shards: Sequence[Shard], view: View, style: PromptStyle, tokens: int | None, selection: SelectConfig
) -> ViewStatistics:
    return view_statistics(shards, view, style, tokens, selection.reweighting if view == "query" else ())


def _default(found: _Found, view: View) -> str:
    """The set of a view with the highest held-out MAP; the first of equal ones."""
    rows = [row for row in found.training["choice"][view] if not row["name"].startswith("icr.")]
    return str(max(rows, key=lambda row: row["MAP"]["mean"])["name"])


def eligible_layers(
    info: ModelInfo, shards: Sequence[Shard], response_tokens: int, max_layer: float = 1.0
) -> Tensor:
    """Layers that see the whole of every calibration prompt, within the first `max_layer` of all. [L] bool

    Heads behind a shorter window cannot vote. Raises DataError when no layer is left.
    """
    longest = max(shard.prompt_tokens for shard in shards) + response_tokens
    last = max(1, round(max_layer * info.n_layers))
    eligible = torch.tensor(
        [i < last and (window is None or window >= longest) for i, window in enumerate(info.windows)]
    )
    if not bool(eligible.any()):
        widest = max(window or 0 for window in info.windows)
        raise DataError(
            "calibration",
            f"the longest prompt has {longest} tokens, no layer sees more than {widest}; use shorter samples",
        )
    return eligible


def _refuse_to_replace(root: Path, info: ModelInfo) -> None:
    """Raise BankError when the folder of the new bank holds the bank of another model."""
    folder = root / slug(info.model_id)
    if (folder / MANIFEST).is_file():
        try:
            check(read(folder), info)
        except BankMismatch as error:
            raise BankError(
                f"{folder} holds the bank of another model ({error.field}); give another --bank"
            ) from error
