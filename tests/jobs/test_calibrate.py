"""The calibration job on a model with planted heads: it finds the planted one, and survives being stopped."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headbank import bank as banks
from headbank.errors import BankError, DataError, NonFiniteScore
from headbank.jobs.calibrate import Calibration, calibrate
from headbank.jobs.capture import CaptureConfig, all_placements, capture_folder, capture_samples
from headbank.jobs.placements import placement_order, placement_positions
from headbank.jobs.select import SelectConfig, select, view_statistics
from headbank.models.base import Capture
from headbank.models.hf import HFRunner
from headbank.numerics.spans import span_mass
from headbank.types import Document, HeadId, ModelInfo, Sample, View
from tests.support.planted import planted_runner, planted_samples

PLACEMENTS = 3


@pytest.fixture(scope="module")
def planted() -> tuple[HFRunner, dict[str, HeadId]]:
    return planted_runner()


def run(runner: HFRunner, samples: Sequence[Sample], root: Path, **options: Any) -> Calibration:
    return calibrate(
        runner,
        samples,
        root,
        data_name="planted.jsonl",
        data_hash="0" * 64,
        placements=PLACEMENTS,
        response_tokens=2,
        **options,
    )


def bank_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_planted_head_is_the_only_expert(planted: Any, tmp_path: Path) -> None:
    runner, heads = planted
    result = run(runner, planted_samples(6), tmp_path, views=("query",), selection=SelectConfig(count=1))
    expert = result.bank.maps["expert.query.expert"]
    assert expert.nonzero().tolist() == [list(heads["planted"])]
    assert result.bank.head_sets["expert.query"].heads == (heads["planted"],)
    assert result.bank.head_sets["expert.query"].strict_experts == 1
    frequency = result.bank.maps["expert.query.frequency"]
    assert frequency[:, *heads["planted"]].tolist() == [1.0] * PLACEMENTS
    # The head that looks at the first place finds golds that stand there, and no others.
    assert frequency[0, *heads["biased"]] > 0
    assert frequency[1:, *heads["biased"]].tolist() == [0.0] * (PLACEMENTS - 1)


def test_the_panel_is_filled_and_says_so(planted: Any, tmp_path: Path) -> None:
    runner, heads = planted
    result = run(runner, planted_samples(4), tmp_path, views=("query",), selection=SelectConfig(count=3))
    chosen = result.bank.head_sets["expert.query"]
    assert chosen.heads[0] == heads["planted"]
    assert (len(chosen.heads), chosen.strict_experts) == (3, 1)
    assert heads["biased"] not in chosen.heads


def test_held_out_metrics_of_the_planted_head_are_perfect(planted: Any, tmp_path: Path) -> None:
    runner, _ = planted
    result = run(runner, planted_samples(4), tmp_path, views=("query",), selection=SelectConfig(count=1, k=1))
    dev = result.bank.head_sets["expert.query"].dev_metrics
    assert dev["samples"] == 4
    assert dev["aggregations"]["borda"]["MAP"] == {"mean": 1.0, "low": 1.0, "high": 1.0}  # type: ignore[index]


def test_shards_hold_the_masses_of_single_captures(planted: Any, tmp_path: Path) -> None:
    runner, _ = planted
    sample = planted_samples(1)[0]
    config = CaptureConfig(PLACEMENTS, ("query", "response"), seed=5, response_tokens=2)
    shard = capture_samples(runner, [sample], config, tmp_path)[0][0]
    for p, position in enumerate(placement_positions(len(sample.distractors), PLACEMENTS)):
        order = placement_order(sample, position, 5)
        layout = runner.prompts.build(sample.question, [sample.documents[i].content for i in order])
        alone = runner.capture(layout, views=config.views, max_new_tokens=2)
        for view in config.views:
            by_place = span_mass(alone.mass[view], layout.documents)
            for place, index in enumerate(order):
                torch.testing.assert_close(
                    shard.mass[view][p, :, :, index].flatten().double(), by_place[:, place], atol=1e-6, rtol=0
                )
    assert shard.gold.tolist() == [document.gold for document in sample.documents]


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_stopped_job_continues_and_writes_the_same_bytes(
    planted: Any, tmp_path: Path, stop_after: int
) -> None:
    runner, _ = planted
    samples = planted_samples(4)
    whole = run(runner, samples, tmp_path / "whole")
    seen: list[bool] = []

    def stop(_: Sample, reused: bool) -> None:
        seen.append(reused)
        if len(seen) == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(runner, samples, tmp_path / "resumed", on_sample=stop)
    assert not (tmp_path / "resumed" / whole.folder.name).exists()
    reused: list[bool] = []
    resumed = run(
        runner, samples, tmp_path / "resumed", on_sample=lambda _, was_there: reused.append(was_there)
    )
    assert reused == [i < stop_after for i in range(4)]
    assert bank_bytes(resumed.folder) == bank_bytes(whole.folder)


def test_other_thresholds_reuse_every_shard(planted: Any, tmp_path: Path) -> None:
    runner, _ = planted
    run(runner, planted_samples(3), tmp_path)
    reused: list[bool] = []
    run(
        runner,
        planted_samples(3),
        tmp_path,
        selection=SelectConfig(tau_f=0.1),
        on_sample=lambda _, was_there: reused.append(was_there),
    )
    assert reused == [True] * 3


@pytest.mark.parametrize(
    "change",
    [{"placements": 2}, {"views": ("query",)}, {"seed": 1}, {"response_tokens": 3}],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_of_the_capture_has_a_folder_of_its_own(
    planted: Any, tmp_path: Path, change: Any
) -> None:
    runner, _ = planted
    base: dict[str, Any] = {"placements": 3, "views": ("query", "response"), "seed": 0, "response_tokens": 2}
    a = capture_folder(tmp_path, runner.info, CaptureConfig(**base))
    b = capture_folder(tmp_path, runner.info, CaptureConfig(**(base | change)))
    assert a != b


def test_unusable_samples_are_counted_by_reason(planted: Any, tmp_path: Path) -> None:
    runner, _ = planted
    good = planted_samples(2)
    word = good[0].documents[0].text.split()[0]
    bad = [
        Sample("no-gold", "question", (Document("a"), Document("b"), Document("c"))),
        Sample("all-gold", "question", (Document("a", gold=True), Document("b", gold=True))),
        Sample("long", "question", (Document(f"{word} " * 100_000, gold=True), *[Document("b")] * 3)),
    ]
    result = run(runner, [*bad, *good], tmp_path, views=("query",))
    assert result.rejected == {
        "no_gold": ["no-gold"],
        "too_few_distractors": ["all-gold"],
        "too_long": ["long"],
    }
    assert result.used == 2
    assert result.bank.training["sample_ids"] == [sample.id for sample in good]


def test_a_file_without_usable_samples_is_an_error(planted: Any, tmp_path: Path) -> None:
    runner, _ = planted
    with pytest.raises(DataError, match="no_gold: 1"):
        run(runner, [Sample("x", "question", (Document("a"), Document("b")))], tmp_path)
    assert list(tmp_path.glob("*/manifest.json")) == []


def test_a_damaged_shard_is_named(planted: Any, tmp_path: Path) -> None:
    runner, _ = planted
    config = CaptureConfig(2, ("query",))
    capture_samples(runner, planted_samples(1), config, tmp_path)
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(BankError, match=shard.name):
        capture_samples(runner, planted_samples(1), config, tmp_path)


def test_the_bank_fits_the_model_and_reads_back(planted: Any, tmp_path: Path) -> None:
    runner, _ = planted
    result = run(runner, planted_samples(3), tmp_path)
    loaded = banks.read(banks.find(tmp_path, runner.info))
    banks.check(loaded, runner.info)
    assert loaded.head_sets == result.bank.head_sets
    assert set(loaded.head_sets) == {"expert.query", "expert.response"}


def test_layers_with_a_short_window_cannot_vote(planted: Any, tmp_path: Path) -> None:
    runner, heads = planted
    config = CaptureConfig(2, ("query",))
    view: View = "query"
    shards = capture_samples(runner, planted_samples(3), config, tmp_path)[0]
    eligible = torch.ones(runner.info.n_layers, dtype=torch.bool)
    eligible[heads["planted"].layer] = False
    chosen = select(view_statistics(shards, view), view, SelectConfig(count=2), eligible).head_set
    assert all(head.layer != heads["planted"].layer for head in chosen.heads)


class Changed:
    """A runner that differs from another in what is given."""

    def __init__(self, runner: HFRunner, info: ModelInfo | None = None, spoil: float | None = None) -> None:
        self.runner, self.spoil = runner, spoil
        self.info = info or runner.info
        self.prompts = runner.prompts

    def capture_many(self, *args: Any, **kwargs: Any) -> list[Capture]:
        captures = self.runner.capture_many(*args, **kwargs)
        if self.spoil is not None:
            mass = {view: rows.clone() for view, rows in captures[-1].mass.items()}
            next(iter(mass.values()))[0, 0] = self.spoil
            captures[-1] = replace(captures[-1], mass=mass)
        return captures


@pytest.mark.parametrize("views", [("query",), ("response",)])
def test_windows_shorter_than_the_prompts_take_their_layers_out(
    planted: Any, tmp_path: Path, views: tuple[View, ...]
) -> None:
    runner, heads = planted
    samples = planted_samples(3)
    shards = capture_samples(
        runner, samples, CaptureConfig(3, views, response_tokens=2), tmp_path / "shards"
    )[0]
    # Exactly as long as the longest prompt: enough for the query, two tokens short for a response.
    window = max(shard.prompt_tokens for shard in shards)
    windows = tuple(
        window if layer == heads["planted"].layer else None for layer in range(runner.info.n_layers)
    )
    result = run(Changed(runner, replace(runner.info, windows=windows)), samples, tmp_path, views=views)  # type: ignore[arg-type]
    chosen = result.bank.head_sets[f"expert.{views[0]}"].heads
    assert (heads["planted"] in chosen) is (views == ("query",))


def test_a_model_that_sees_no_prompt_whole_is_an_error(planted: Any, tmp_path: Path) -> None:
    runner, _ = planted
    blind = replace(runner.info, windows=(8,) * runner.info.n_layers)
    with pytest.raises(DataError, match="no layer sees more than 8"):
        run(Changed(runner, blind), planted_samples(2), tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_attention_that_is_not_finite_never_becomes_a_shard(
    planted: Any, tmp_path: Path, value: float
) -> None:
    runner, _ = planted
    sample = planted_samples(1)[0]
    with pytest.raises(NonFiniteScore, match=sample.id):
        run(Changed(runner, spoil=value), [sample], tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.glob(".captures/*/*.safetensors")) == []


def test_the_bank_of_another_model_is_not_replaced(planted: Any, tmp_path: Path) -> None:
    runner, _ = planted
    before = bank_bytes(run(runner, planted_samples(2), tmp_path).folder)
    other = Changed(runner, replace(runner.info, config_hash="other"))
    with pytest.raises(BankError, match="config_hash"):
        run(other, planted_samples(2), tmp_path)  # type: ignore[arg-type]
    assert bank_bytes(tmp_path / banks.slug(runner.info.model_id)) == before


def test_all_placements_go_by_the_most_frequent_number_of_distractors() -> None:
    def sample(distractors: int) -> Sample:
        return Sample("s", "q", (Document("g", gold=True), *[Document("d")] * distractors))

    assert all_placements([sample(8), sample(8), sample(6)]) == 9
