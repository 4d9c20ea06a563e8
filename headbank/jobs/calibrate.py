"""The calibration job: samples -> shards -> expert heads -> bank."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from headbank.bank import MANIFEST, Bank, check, read, slug, write
from headbank.errors import BankError, BankMismatch, DataError
from headbank.jobs.capture import CaptureConfig, Shard, all_placements, capture_folder, capture_samples
from headbank.jobs.select import SelectConfig, describe, select, view_statistics
from headbank.models.base import HeadRunner
from headbank.types import ModelInfo, Sample, View


@dataclass(frozen=True)
class Calibration:
    """What a finished job leaves."""

    folder: Path
    bank: Bank
    used: int
    rejected: dict[str, list[str]]


def calibrate(
    runner: HeadRunner,
    samples: Sequence[Sample],
    root: Path,
    *,
    data_name: str,
    data_hash: str,
    placements: int | None = None,
    views: tuple[View, ...] = ("query", "response"),
    seed: int = 0,
    response_tokens: int = 16,
    selection: SelectConfig | None = None,
    on_sample: Callable[[Sample, bool], None] | None = None,
) -> Calibration:
    """Find a model's expert heads and write its bank under `root`.

    `placements` None takes all of them. A job that was stopped continues when it is called again with the same
    arguments, and writes the same bytes. Raises DataError when no sample can be used, BankError when the bank's
    folder holds the bank of another model, NonFiniteScore when the model's attention is not finite.
    """
    _refuse_to_replace(root, runner.info)
    capture = CaptureConfig(placements or all_placements(samples), views, seed, response_tokens)
    select_config = selection or SelectConfig(seed=seed)
    folder = capture_folder(root, runner.info, capture)
    shards, rejected = capture_samples(runner, samples, capture, folder, on_sample)
    if not shards:
        reasons = ", ".join(f"{reason}: {len(ids)}" for reason, ids in sorted(rejected.items()))
        raise DataError(
            data_name, f"none of {len(samples)} samples can be used ({reasons or 'the file is empty'})"
        )
    selected = {
        view: select(
            view_statistics(shards, view),
            view,
            select_config,
            _eligible(runner.info, shards, view, response_tokens),
        )
        for view in views
    }
    bank = Bank(
        info=runner.info,
        layout="joint",
        head_sets={s.head_set.name: s.head_set for s in selected.values()},
        maps={name: value for s in selected.values() for name, value in s.maps.items()},
        training={
            "data": data_name,
            "data_sha256": data_hash,
            "sample_ids": [shard.sample_id for shard in shards],
            "rejected": rejected,
            "capture": asdict(capture) | {"views": list(capture.views)},
            "selection": describe(select_config),
            "counts": {view: s.counts for view, s in selected.items()},
            "versions": {name: version(name) for name in ("headrank", "torch", "transformers")},
        },
    )
    return Calibration(write(bank, root), bank, len(shards), rejected)


def _eligible(info: ModelInfo, shards: Sequence[Shard], view: View, response_tokens: int) -> torch.Tensor:
    """Layers that see the whole of every calibration prompt; heads behind a shorter window cannot vote. [L] bool

    Raises DataError when no layer does.
    """
    longest = max(shard.prompt_tokens for shard in shards) + (response_tokens if view == "response" else 0)
    eligible = torch.tensor([window is None or window >= longest for window in info.windows])
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
