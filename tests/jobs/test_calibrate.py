"""The calibration job on a model with planted heads: every detector finds the planted one, whatever stops the job."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headbank import bank as banks
from headbank.errors import BankError, DataError, InputError
from headbank.jobs import calibrate as module
from headbank.jobs.calibrate import CalibrateConfig, Calibration, calibrate, check_samples, eligible_layers
from headbank.jobs.capture import CaptureConfig, capture_samples
from headbank.models.base import Capture, CaptureRequest
from headbank.models.hf import HFRunner
from headbank.types import Document, ModelInfo, PromptStyle, Sample, View
from tests.jobs.shards import QUICK
from tests.support.planted import BIASED, COPIER, PLANTED, planted_runner, planted_samples

JOINT_ONLY, PARALLEL_ONLY = (PromptStyle("joint"),), (PromptStyle("parallel"),)
LAYOUTS = ("joint", "parallel")
QUICK_CONFIG = CalibrateConfig(
    views=("query",), placements=3, detectors=("expert",), response_tokens=2, selection=QUICK, curves=False
)


def run(
    samples: Sequence[Sample],
    root: Path,
    runner: Any = None,
    config: CalibrateConfig = QUICK_CONFIG,
    **options: Any,
) -> Calibration:
    return calibrate(
        runner or planted_runner()[0],
        samples,
        root,
        data_name="planted.jsonl",
        data_hash="0" * 64,
        config=config,
        **options,
    )


def bank_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def oracle(sample: Sample) -> Tensor:
    """A voter that knows the golds."""
    return torch.tensor([float(document.gold) for document in sample.documents], dtype=torch.float64)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """Everything at once: all detectors, both layouts and views, a voter, curves."""
    config = CalibrateConfig(placements=3, response_tokens=2, selection=QUICK)
    root = tmp_path_factory.mktemp("banks")
    return run(planted_samples(8), root, config=config, voters={"bm25": oracle})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("view", ["query", "response"])
def test_the_planted_head_is_the_only_expert(whole: Calibration, view: View, layout: str) -> None:
    name = f"expert.{view}.{layout}"
    assert whole.bank.maps[f"{name}.expert"].nonzero().tolist() == [list(PLANTED)]
    heads = whole.bank.head_sets[name]
    assert (heads.heads[0], heads.strict_experts, len(heads.heads)) == (PLANTED, 1, QUICK.count)
    frequency = whole.bank.maps[f"{name}.frequency"]
    assert set(frequency[:, *PLANTED].tolist()) == {1.0}
    assert len(frequency) == (3 if layout == "joint" else 1)
    counts = whole.bank.training["counts"][name]
    assert (counts["experts"], counts["best_worst_placement_frequency"]) == (1, 1.0)


@pytest.mark.parametrize("view", ["query", "response"])
def test_the_biased_head_finds_only_golds_that_stand_in_front(whole: Calibration, view: View) -> None:
    frequency = whole.bank.maps[f"expert.{view}.joint.frequency"][:, *BIASED]
    assert frequency[0] > 0.5
    assert frequency[1:].tolist() == [0.0, 0.0]
    assert whole.bank.maps[f"expert.{view}.joint.expert"][BIASED] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("view", ["query", "response"])
@pytest.mark.parametrize("detector", ["greedy", "contrastive", "qr", "weighted"])
def test_every_detector_puts_the_planted_head_first(
    whole: Calibration, detector: str, view: View, layout: str
) -> None:
    heads = whole.bank.head_sets[f"{detector}.{view}.{layout}"]
    if detector == "greedy":
        assert heads.heads == (PLANTED,)
    elif detector == "weighted":
        weights = dict(zip(heads.heads, heads.weights, strict=True))
        assert max(weights, key=lambda head: weights[head]) == PLANTED
        # The copier looks at content words, of which golds have fewer: it counts, the other way round.
        assert {heads.heads[0], heads.heads[1]} == {PLANTED, COPIER}
        assert weights[BIASED] < 0.1 * weights[PLANTED]
    else:
        assert heads.heads[0] == PLANTED
        assert len(heads.heads) == QUICK.panel


@pytest.mark.parametrize("layout", LAYOUTS)
def test_held_out_ranking_by_the_planted_head_is_perfect(whole: Calibration, layout: str) -> None:
    for view in ("query", "response"):
        record: Any = whole.bank.head_sets[f"greedy.{view}.{layout}"].dev_metrics
        assert record["samples"] == 8
        assert record["aggregations"]["evidence"]["MAP"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
        assert record["calibration_error"] < 0.15


def test_the_default_is_the_first_of_those_with_the_highest_map(whole: Calibration) -> None:
    for view, name in whole.bank.defaults.items():
        rows = whole.bank.training["choice"][view]
        assert [row["name"] for row in rows] == [
            f"{detector}.{view}.{layout}"
            for layout in LAYOUTS
            for detector in ("expert", "weighted", "greedy", "contrastive", "qr", "icr")
        ]
        means = {row["name"]: row["MAP"]["mean"] for row in rows}
        assert name == next(n for n, mean in means.items() if mean == max(means.values()))
        heads: Any = whole.bank.head_sets[name]
        row = next(row for row in rows if row["name"] == name)
        assert row["MAP"] == heads.dev_metrics["aggregations"][heads.default_aggregation]["MAP"]
        assert row["style"] == str(heads.style)


def test_the_choice_is_the_highest_map_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # What a set measures is set from outside; icr is no set of the bank, however good.
    wanted = {"expert.joint": 0.5, "qr.joint": 0.7, "icr.joint": 0.9}
    wanted |= {"expert.parallel": 0.4, "qr.parallel": 0.8, "icr.parallel": 0.9}
    by_evidence = {"expert.joint": 0.3, "qr.joint": 0.4, "icr.joint": 1.0}
    by_evidence |= {"expert.parallel": 0.6, "qr.parallel": 0.2, "icr.parallel": 1.0}
    plain = module.select

    def select(problem: Any, detector: str) -> Any:
        found = plain(problem, detector)
        layout = problem.statistics.style.layout
        mean = wanted[f"{detector}.{layout}"]
        values = {"evidence": {"MAP": [by_evidence[f"{detector}.{layout}"]]}}
        metrics = {"MAP": {"mean": mean, "low": mean, "high": mean}}
        return replace(found, metrics=metrics, held_out=replace(found.held_out, values=values))

    monkeypatch.setattr(module, "select", select)
    config = replace(QUICK_CONFIG, detectors=("expert", "qr", "icr"))
    result = run(planted_samples(4), tmp_path, config=config, voters={"bm25": oracle})
    assert result.bank.defaults == {"query": "qr.query.parallel"}
    # A fusion weighs evidence, so it goes with the set of its layout whose evidence ranks best.
    assert {f.name: f.head_set for f in result.bank.fusions.values()} == {
        "fusion.query.joint": "qr.query.joint",
        "fusion.query.parallel": "expert.query.parallel",
    }
    assert not [name for name in result.bank.head_sets if name.startswith("icr")]


def test_a_bank_has_its_fusions_and_curves(whole: Calibration) -> None:
    assert set(whole.bank.fusions) == {f"fusion.{v}.{la}" for v in ("query", "response") for la in LAYOUTS}
    for fusion in whole.bank.fusions.values():
        assert fusion.voters == ("bm25",)
        assert fusion.dev_metrics["MAP"]["mean"] == 1.0  # type: ignore[index]
    curves = whole.bank.training["curves"]
    assert set(curves) == {
        *(f"layers.{v}.{la}" for v in ("query", "response") for la in LAYOUTS),
        *(f"tokens.response.{la}" for la in LAYOUTS),
    }
    # The planted head is in the second of three layers.
    greedy = [row["greedy"]["MAP"]["mean"] for row in curves["layers.query.parallel"]]
    assert greedy[0] < 0.6 and greedy[1:] == [1.0, 1.0]


def test_the_record_says_how_the_bank_was_made(whole: Calibration) -> None:
    record = whole.bank.training
    assert record["placements"] == {"joint": 3, "parallel": "as given"}
    assert record["sample_ids"] == [f"planted-{i}" for i in range(8)]
    assert [style["layout"] for style in record["styles"]] == list(LAYOUTS)
    assert record["selection"]["strengths"] == [0.1]
    assert (record["data"], record["data_sha256"], record["rejected"]) == ("planted.jsonl", "0" * 64, {})


def test_the_bank_fits_the_model_and_reads_back(whole: Calibration) -> None:
    info = planted_runner()[0].info
    loaded = banks.read(banks.find(whole.folder.parent, info))
    banks.check(loaded, info)
    assert (loaded.head_sets, loaded.fusions, loaded.defaults) == (
        whole.bank.head_sets,
        whole.bank.fusions,
        whole.bank.defaults,
    )
    assert len(loaded.head_sets) == 5 * 4


def test_a_voter_is_asked_once_for_a_sample(tmp_path: Path) -> None:
    asked: list[str] = []

    def voter(sample: Sample) -> Tensor:
        asked.append(sample.id)
        return oracle(sample)

    run(planted_samples(3), tmp_path, voters={"bm25": voter})
    assert sorted(asked) == [f"planted-{i}" for i in range(3)]


# Stopped and started again


@pytest.mark.parametrize("stop_after", [1, 5])
def test_a_stopped_job_continues_and_writes_the_same_bytes(tmp_path: Path, stop_after: int) -> None:
    samples = planted_samples(4)
    config = replace(QUICK_CONFIG, views=("query", "response"), detectors=("greedy",))
    whole = run(samples, tmp_path / "whole", config=config, voters={"bm25": oracle})
    seen: list[bool] = []

    def stop(_: Sample, reused: bool) -> None:
        seen.append(reused)
        if len(seen) == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(samples, tmp_path / "resumed", config=config, voters={"bm25": oracle}, on_sample=stop)
    assert not (tmp_path / "resumed" / whole.folder.name).exists()
    reused: list[bool] = []
    resumed = run(
        samples,
        tmp_path / "resumed",
        config=config,
        voters={"bm25": oracle},
        on_sample=lambda _, was_there: reused.append(was_there),
    )
    # Four samples in joint prompts, then four in parallel ones.
    assert reused == [i < stop_after for i in range(8)]
    assert bank_bytes(resumed.folder) == bank_bytes(whole.folder)


def test_other_thresholds_and_voters_reuse_every_shard(tmp_path: Path) -> None:
    run(planted_samples(3), tmp_path)
    reused: list[bool] = []
    config = replace(QUICK_CONFIG, detectors=("greedy",), selection=replace(QUICK, tau_f=0.1, folds=2))
    run(
        planted_samples(3),
        tmp_path,
        config=config,
        voters={"bm25": oracle},
        on_sample=lambda _, was_there: reused.append(was_there),
    )
    assert reused == [True] * 6


def test_captures_may_lie_elsewhere(tmp_path: Path) -> None:
    run(planted_samples(2), tmp_path / "banks", captures=tmp_path / "scratch")
    assert [path.name for path in (tmp_path / "banks").iterdir()] == ["planted"]
    assert len(list(tmp_path.glob("scratch/.captures/*/*.safetensors"))) == 4


# What cannot be used


def test_the_record_names_what_was_not_used(tmp_path: Path) -> None:
    good = planted_samples(3)
    gold = Document("amber", gold=True, relevance=1)
    few = Sample("few", "amber?", (gold, Document("basalt")))
    none = Sample("none", "amber?", (Document("basalt"), Document("cedar")))
    result = run([few, none, *good], tmp_path)
    assert result.rejected == {"too_few_distractors": ["few"], "no_gold": ["none"]}
    # One distractor is enough for a parallel prompt.
    assert result.bank.training["sample_ids"] == ["few", *(sample.id for sample in good)]
    assert result.used == 4
    alone = run([few, *good], tmp_path / "joint", config=replace(QUICK_CONFIG, styles=JOINT_ONLY))
    assert alone.bank.training["sample_ids"] == [sample.id for sample in good]


def unlabelled(sample: Sample) -> Sample:
    return replace(sample, documents=tuple(replace(d, gold=False, relevance=0) for d in sample.documents))


@pytest.mark.parametrize(
    "samples",
    [
        [],
        planted_samples(1),
        [unlabelled(sample) for sample in planted_samples(3)],
        [planted_samples(2)[0], unlabelled(planted_samples(2)[1])],
        [replace(planted_samples(1)[0], id=str(i)) for i in range(4)],
    ],
    ids=["empty", "single", "no golds", "one with golds", "one question"],
)
def test_fewer_than_two_questions_are_refused_before_anything_is_captured(
    tmp_path: Path, samples: list[Sample]
) -> None:
    with pytest.raises(DataError, match="at least 2"):
        check_samples(samples, "file", QUICK_CONFIG)
    with pytest.raises(DataError, match="at least 2"):
        run(samples, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fewer_than_two_questions_that_fit_are_refused(tmp_path: Path) -> None:
    first, second = planted_samples(2)
    gold = next(d for d in second.documents if d.gold)
    long = replace(gold, text="amber " * 5000)
    second = replace(second, documents=(long, *[d for d in second.documents if not d.gold]))
    with pytest.raises(DataError, match=r"1 of 2 samples can be used.*too_long: 1"):
        run([first, second], tmp_path)
    assert list(tmp_path.glob("*/manifest.json")) == []


def test_more_placements_than_two_questions_allow_are_refused() -> None:
    # Golds in turn one and two: 5, 4 and 5 distractors. Two questions allow 5 placements, with the third 6.
    samples = planted_samples(3, n_documents=6)
    for n, most in ((2, 5), (3, 6)):
        check_samples(samples[:n], "file", CalibrateConfig(placements=most))
        for placements in (most + 1, 99):
            with pytest.raises(InputError) as caught:
                check_samples(samples[:n], "file", CalibrateConfig(placements=placements))
            assert (caught.value.field, caught.value.limit) == ("placements", most)
    check_samples(samples, "file", CalibrateConfig(placements=99, styles=PARALLEL_ONLY))


def test_ids_that_repeat_are_refused() -> None:
    with pytest.raises(DataError, match="same id"):
        check_samples([replace(sample, id="x") for sample in planted_samples(2)], "file", QUICK_CONFIG)


# Other models


class Changed:
    """The planted runner under another identity."""

    def __init__(self, info: ModelInfo) -> None:
        self._runner: HFRunner = planted_runner()[0]
        self.info, self.prompts = info, self._runner.prompts

    def capture_many(self, requests: Sequence[CaptureRequest]) -> list[Capture]:
        return self._runner.capture_many(requests)


@pytest.mark.parametrize("view", ["query", "response"])
def test_windows_shorter_than_the_prompts_take_their_layers_out(tmp_path: Path, view: View) -> None:
    runner, _ = planted_runner()
    samples = planted_samples(3)
    capture = CaptureConfig(3, (view,), response_tokens=2)
    shards = capture_samples(runner, samples, capture, tmp_path / "shards")[0]
    # Exactly as long as the longest prompt: enough for the query, two tokens short for a response.
    window = max(shard.prompt_tokens for shard in shards)
    windows = tuple(window if layer == PLANTED.layer else None for layer in range(runner.info.n_layers))
    config = replace(QUICK_CONFIG, views=(view,), styles=JOINT_ONLY)
    result = run(samples, tmp_path, Changed(replace(runner.info, windows=windows)), config)
    chosen = result.bank.head_sets[f"expert.{view}.joint"].heads
    assert (PLANTED in chosen) is (view == "query")


@pytest.mark.parametrize(("share", "layers"), [(0.01, 1), (0.5, 2), (0.67, 2), (1.0, 3)])
def test_the_layer_budget_counts_from_the_first(tmp_path: Path, share: float, layers: int) -> None:
    runner, _ = planted_runner()
    shards = capture_samples(runner, planted_samples(1), CaptureConfig(2, ("query",)), tmp_path)[0]
    assert eligible_layers(runner.info, shards, 0, share).tolist() == [i < layers for i in range(3)]


def test_heads_beyond_the_budget_do_not_vote(tmp_path: Path) -> None:
    config = replace(QUICK_CONFIG, detectors=("expert", "greedy"), selection=replace(QUICK, max_layer=0.34))
    result = run(planted_samples(3), tmp_path, config=config)
    assert {head.layer for heads in result.bank.head_sets.values() for head in heads.heads} == {0}


def test_a_model_that_sees_no_prompt_whole_is_an_error(tmp_path: Path) -> None:
    blind = replace(planted_runner()[0].info, windows=(8,) * 3)
    with pytest.raises(DataError, match="no layer sees more than 8"):
        run(planted_samples(2), tmp_path, Changed(blind))


def test_the_bank_of_another_model_is_not_replaced(tmp_path: Path) -> None:
    before = bank_bytes(run(planted_samples(2), tmp_path).folder)
    other = Changed(replace(planted_runner()[0].info, config_hash="other"))
    with pytest.raises(BankError, match="config_hash"):
        run(planted_samples(2), tmp_path, other)
    assert bank_bytes(tmp_path / "planted") == before
