"""`headrank calibrate`, end to end: files in; a bank, tables and pictures out; and nothing loaded for bad options."""

import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headbank import bank as banks
from headbank.cli.calibrate import DETECTORS, open_voters, read_data
from headbank.cli.calibrate_report import why
from headbank.data.readers import data_hash
from headbank.data.synthetic import generate, synthetic_hash
from headbank.errors import DataError, InputError
from headbank.jobs import detect
from headbank.models import loading
from headbank.rerankers.bm25 import BM25
from headbank.types import PromptStyle, RankOptions
from tests.bank.sample_bank import sample_bank
from tests.cli.commands import run, write_questions
from tests.support.planted import PLANTED, planted_runner, planted_samples, planted_tokenizer

FAKE = ("calibrate", "--model", "fake", "--methods", "greedy,expert", "--no-curves")
QUERY_ONLY = (*FAKE, "--view", "query", "--layout", "parallel", "--methods", "greedy")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_questions(tmp_path / "questions.jsonl", range(6))


def manifest(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(next(root.glob("*/manifest.json")).read_text())
    return content


def test_the_names_of_detectors_are_those_of_the_job() -> None:
    assert tuple(detect.DETECTORS) == DETECTORS


def test_a_bank_its_tables_and_its_pictures(tmp_path: Path, data: Path) -> None:
    root = tmp_path / "banks"
    out = run(*FAKE[:-1], "--bank", str(root), "--data", str(data), "--heads", "2")
    found = manifest(root)
    assert set(found["head_sets"]) == {
        f"{detector}.{view}.{layout}"
        for detector in ("greedy", "expert")
        for view in ("query", "response")
        for layout in ("joint", "parallel")
    }
    # The matching head ranks first wherever the gold stands; the biased one only where that is in front.
    expert = found["head_sets"]["expert.query.joint"]
    assert (expert["heads"][0], expert["strict_experts"]) == ([2, 1], 1)
    assert found["head_sets"]["greedy.query.joint"]["heads"] == [[2, 1]]
    assert found["training"]["placements"] == {"joint": 4, "parallel": "as given"}
    assert set(found["fusions"]) == {
        f"fusion.{v}.{la}" for v in ("query", "response") for la in ("joint", "parallel")
    }
    for text in (
        "fake, query view: head sets on held-out questions",
        "default of the query view: greedy.query.joint, the highest MAP on held-out questions (1.000",
        "heads that find the golds wherever these stand",
        "L2H1 L0H0 (1 strict)",
        "fusion.response.parallel",
        "layers.query.joint: MAP on held-out questions",
        "tokens.response.parallel: MAP on held-out questions",
        "6 samples used in 2 prompt styles (0 captured earlier), rejected: none",
        "peak memory",
    ):
        assert text in out, text
    for picture in ("fake.query.png", "fake.response.png", "fake.curves.png"):
        assert f"{root / picture}" in out
        assert (root / picture).stat().st_size > 10_000
    assert "L2H1" in run("bank", "show", str(root))
    run("bank", "verify", str(root), "--model", "fake")


def test_the_default_set_is_marked_and_all_are_listed(tmp_path: Path, data: Path) -> None:
    root = tmp_path / "banks"
    out = run(
        *FAKE, "--view", "query", "--bank", str(root), "--data", str(data), "--methods", "qr,greedy,icr"
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    sets = {row[1]: row for row in rows if len(row) > 5}
    assert {name for name in sets if name.split(".")[0] in ("qr", "greedy", "icr")} == set(sets)
    assert len(sets) == 6
    default = manifest(root)["defaults"]["query"]
    assert [name for name, row in sets.items() if row[0] == "*"] == [default]
    assert "curves" not in out and "head map" not in out


def test_rerank_by_what_was_calibrated(tmp_path: Path, data: Path) -> None:
    root = tmp_path / "banks"
    run(*QUERY_ONLY, "--bank", str(root), "--data", str(data))
    documents = "Bread is baked early.\nThe heron rests in cave 9.\nRivers carry water.\n"
    for method in ("heads", "fusion"):
        answer = json.loads(
            run(
                "rerank", "-q", "Where does the heron sleep?", "--model", "fake", "--bank", str(root),
                "--method", method, "--json", stdin=documents,
            )
        )  # fmt: skip
        assert answer["method"] == method
        assert answer["results"][0]["index"] == 1
        assert len(answer["raw_scores"]) == 3 and max(answer["raw_scores"]) == answer["raw_scores"][1]
        assert 0 < answer["results"][0]["relevance_score"] < 1


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model whose heads are known, as a folder."""
    folder = tmp_path_factory.mktemp("models") / "Planted"
    copy.deepcopy(planted_runner()[0]._model).save_pretrained(folder)
    planted_tokenizer().save_pretrained(folder)
    return folder


def test_the_planted_head_of_a_real_model_is_found(planted: Path, tmp_path: Path) -> None:
    path = tmp_path / "planted.jsonl"
    rows = [
        {
            "id": s.id,
            "question": s.question,
            "documents": [{"text": d.text, "gold": d.gold} for d in s.documents],
        }
        for s in planted_samples(6)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    root = tmp_path / "banks"
    out = run(
        "calibrate", "--model", str(planted), "--dtype", "float32", "--device", "cpu", "--bank", str(root),
        "--data", str(path), "--methods", "expert,greedy", "--heads", "1", "--placements", "3", "--no-curves",
        "--response-tokens", "2", "--voters", "none",
    )  # fmt: skip
    sets = manifest(root)["head_sets"]
    assert len(sets) == 8
    assert {json.dumps(heads["heads"]) for heads in sets.values()} == {json.dumps([list(PLANTED)])}
    assert manifest(root)["fusions"] == {}
    assert "expert.query.joint" in out
    run("bank", "verify", str(root), "--model", str(planted))


def test_a_killed_run_continues_to_the_same_bytes(tmp_path: Path) -> None:
    data = write_questions(tmp_path / "many.jsonl", range(200))

    def arguments(root: Path) -> list[str]:
        return [*QUERY_ONLY, "--bank", str(root), "--data", str(data)]

    code = "from headbank.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *arguments(tmp_path / "killed")], env=os.environ)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "killed").glob(".captures/*/*.safetensors"))) < 20:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list((tmp_path / "killed").glob(".captures/*/*.safetensors")))
    assert done < 200, "the run was over before it could be killed"
    assert not (tmp_path / "killed" / "fake").exists()
    out = run(*arguments(tmp_path / "killed"))
    assert f"({done} captured earlier)" in out
    run(*arguments(tmp_path / "whole"))
    for name in ("manifest.json", "maps.safetensors"):
        assert (tmp_path / "killed/fake" / name).read_bytes() == (tmp_path / "whole/fake" / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "styles"),
    [
        (["--layout", "parallel", "--tail", "total"], [PromptStyle("parallel", tail="total")]),
        (
            ["--no-label", "--query-first", "--tail", "total"],
            [PromptStyle("joint", False, True), PromptStyle("parallel", False, True, "total")],
        ),
    ],
)
def test_prompt_styles_are_options(
    tmp_path: Path, data: Path, options: list[str], styles: list[PromptStyle]
) -> None:
    run(
        *FAKE,
        "--view",
        "query",
        "--methods",
        "qr",
        "--bank",
        str(tmp_path / "b"),
        "--data",
        str(data),
        *options,
    )
    recorded = manifest(tmp_path / "b")
    assert [PromptStyle(**style) for style in recorded["training"]["styles"]] == styles
    assert [heads["style"] for heads in recorded["head_sets"].values()] == recorded["training"]["styles"]


def test_numbers_reach_the_job(tmp_path: Path, data: Path) -> None:
    captures = tmp_path / "captures"
    run(
        *QUERY_ONLY, "--bank", str(tmp_path / "b"), "--data", str(data), "--limit", "5", "--max-layer", "0.5",
        "--tau-f", "0.3", "--tau-p", "0.7", "--seed", "4", "--response-tokens", "3", "--captures", str(captures),
    )  # fmt: skip
    record = manifest(tmp_path / "b")["training"]
    selection = record["selection"]
    assert (selection["max_layer"], selection["tau_f"], selection["tau_p"], selection["seed"]) == (
        0.5,
        0.3,
        0.7,
        4,
    )
    assert (record["seed"], record["response_tokens"], len(record["sample_ids"])) == (4, 3, 5)
    assert len(list(captures.glob(".captures/*/*.safetensors"))) == 5
    assert not (tmp_path / "b" / ".captures").exists()


# Data


def test_synthetic_samples_need_no_file(tmp_path: Path) -> None:
    run(*QUERY_ONLY, "--bank", str(tmp_path), "--data", "synthetic", "--limit", "4", "--seed", "2")
    record = manifest(tmp_path)["training"]
    assert record["data"] == "synthetic"
    assert record["data_sha256"] == synthetic_hash(4, 2, 10)
    assert record["sample_ids"] == [sample.id for sample in generate(4, seed=2)]


def test_a_hundred_synthetic_samples_are_the_default() -> None:
    found = read_data(["synthetic"], None, 0)
    assert found.samples == generate(100, seed=0)
    assert found.sha256 == synthetic_hash(100, 0, 10)


def test_files_are_pooled_under_ids_that_differ(tmp_path: Path) -> None:
    a = write_questions(tmp_path / "a.jsonl", range(3))
    b = write_questions(tmp_path / "b.jsonl", range(1, 4))
    (tmp_path / "more").mkdir()
    c = write_questions(tmp_path / "more" / "b.jsonl", range(1, 2))
    alone = read_data([str(a)], 2, 0)
    assert (alone.name, alone.sha256, len(alone.samples)) == ("a.jsonl", data_hash(a), 2)
    found = read_data([str(a), str(b), str(c)], 2, 0)
    assert found.name == "a.jsonl+b.jsonl+b.jsonl"
    assert [sample.id for sample in found.samples] == ["q0", "q1", "b.jsonl/q1", "q2", "b.jsonl/b.jsonl/q1"]
    digests = "".join(map(data_hash, (a, b, c)))
    assert found.sha256 == hashlib.sha256(digests.encode()).hexdigest()
    assert found.samples[1].documents == found.samples[2].documents
    with pytest.raises(InputError, match="a source twice"):
        read_data([str(a), str(a)], None, 0)


def test_a_question_in_two_files_is_no_held_out_question(tmp_path: Path) -> None:
    a, b = (write_questions(tmp_path / name, range(1)) for name in ("a.jsonl", "b.jsonl"))
    with pytest.raises(DataError, match=r"a.jsonl\+b.jsonl: 1 questions have a gold"):
        run(*FAKE, "--bank", str(tmp_path), "--data", str(a), "--data", str(b))


# Voters


class Cosine:
    """Stands for the dense model: the number of common letters, without raw scores."""

    name = "dense"

    def __init__(self, model: str, device: str | None = None) -> None:
        self.model, self.device = model, device

    def rank(self, query: str, documents: list[str], options: RankOptions) -> Any:
        scores = tuple(len(set(query) & set(document)) / 100 for document in documents)
        return type("Scores", (), {"scores": scores, "raw_scores": None})()


def test_voters_are_the_raw_scores_of_rerankers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headbank.rerankers.dense.Dense", Cosine)
    sample = generate(1)[0]
    texts = [document.content for document in sample.documents]
    voters = open_voters(["bm25", "dense"], "minilm", "auto")
    raw = BM25().rank(sample.question, texts, RankOptions()).raw_scores
    assert raw is not None and max(raw) > 1
    assert voters["bm25"](sample).tolist() == list(raw)
    assert voters["bm25"](sample).dtype == torch.float64
    assert voters["dense"](sample).tolist() == [len({*sample.question} & {*text}) / 100 for text in texts]


def test_the_dense_model_of_a_fusion_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path
) -> None:
    monkeypatch.setattr("headbank.rerankers.dense.Dense", Cosine)
    options = ("--bank", str(tmp_path / "b"), "--data", str(data), "--voters", "bm25,dense")
    out = run(*QUERY_ONLY, *options, "--dense-model", "minilm")
    fusion = manifest(tmp_path / "b")["fusions"]["fusion.query.parallel"]
    assert (fusion["voters"], fusion["dense_model"], len(fusion["weights"])) == (
        ["bm25", "dense"],
        "minilm",
        3,
    )
    assert "bm25" in out and "dense" in out


# Refused before anything is loaded


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--data", "no.jsonl"], "no.jsonl: cannot be read"),
        (["--methods", "x"], "methods: must name at least one of expert, weighted"),
        (["--methods", ""], "methods: must name"),
        (["--methods", "icr"], "methods: icr is compared with others"),
        (["--placements", "0"], "placements: must be `all` or a whole number"),
        (["--placements", "-1"], "placements: must be `all` or a whole number"),
        (["--placements", "99"], "placements: are 99, at least two questions allow only up to 4"),
        (["--view", "x"], "view: must be one of query, response, both"),
        (["--layout", "x"], "layout: must be one of joint, parallel, both"),
        (["--voters", "x"], "voters: must name at least one of bm25, dense"),
        (["--voters", "bm25,none"], "voters: must name at least one of bm25, dense"),
        (["--max-layer", "0"], "max_layer: must be over 0"),
        (["--tail", "short"], "tail: must be one of longest, total"),
        (["--tail", "total", "--layout", "joint"], "tail: is a choice of the layout parallel"),
        (["--limit", "1"], "1 questions have a gold document and a distractor, calibration needs at least 2"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path, options: list[str], error: str
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(loading, "load_runner", load)
    given = [] if "--data" in options else ["--data", str(data)]
    with pytest.raises((InputError, DataError)) as caught:
        run("calibrate", "--model", "fake", "--bank", str(tmp_path / "b"), *given, *options)
    assert error in str(caught.value)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("placements", ["99", "all"])
def test_parallel_prompts_need_no_placements(tmp_path: Path, data: Path, placements: str) -> None:
    run(*QUERY_ONLY, "--bank", str(tmp_path / "b"), "--data", str(data), "--placements", placements)
    assert manifest(tmp_path / "b")["training"]["placements"] == {"parallel": "as given"}


# The sentence on the choice


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (
            {"mean": 0.72, "low": 0.6, "high": 0.8},
            "next is expert.query.joint with 0.720, inside its interval",
        ),
        (
            {"mean": 0.5, "low": 0.4, "high": 0.6},
            "next is expert.query.joint with 0.500, outside its interval",
        ),
    ],
)
def test_the_choice_is_said_with_what_it_was_chosen_from(second: dict[str, float], expected: str) -> None:
    best = {"mean": 0.75, "low": 0.7, "high": 0.81}
    rows = [
        {"name": "weighted.query.parallel", "MAP": best},
        {"name": "expert.query.joint", "MAP": second},
        {"name": "icr.query.parallel", "MAP": {"mean": 0.9, "low": 0.9, "high": 0.9}},
    ]
    text = why(sample_bank(training={"choice": {"query": rows}}), "query")
    assert text == (
        "default of the query view: weighted.query.parallel, the highest MAP on held-out questions "
        f"(0.750 [0.700, 0.810]); {expected}"
    )
    alone = why(sample_bank(training={"choice": {"query": rows[:1]}}), "query")
    assert alone.endswith("(0.750 [0.700, 0.810])")


def test_the_written_bank_reads_back(tmp_path: Path, data: Path) -> None:
    run(*QUERY_ONLY, "--bank", str(tmp_path / "b"), "--data", str(data))
    loaded = banks.read(banks.locate(tmp_path / "b"))
    assert loaded.head_set("query").name == "greedy.query.parallel"
    assert loaded.fusion("query").head_set == "greedy.query.parallel"
