"""`headrank bench`, end to end on a tiny model."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headbank.cli import app
from headbank.errors import InputError
from headbank.jobs import bench_memory
from headbank.models.loading import load_runner
from headbank.rerankers import heads as heads_module
from headbank.types import HeadId
from tests.support.banks import bank_of
from tests.support.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Tiny-Llama"
    copy.deepcopy(tiny_model("llama")).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def run(saved: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    fixed = ["bench", "--model", str(saved), "--device", "cpu", "--dtype", "float32", "--rounds", "2"]
    fixed += ["--document-tokens", "10", "--query-tokens", "5", "--response-tokens", "3"]
    result = CliRunner().invoke(app, [*fixed, *arguments], catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads(result.stdout.rstrip("\n").split("\n")[-1])


def test_a_table_for_people_and_one_line_for_programs(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    out, content = run(saved, "--documents", "3,2", "--seed", "7", "--json", str(path))
    assert json.loads(path.read_text()) == content
    assert (content["model"], content["dtype"], content["device"]) == ("Tiny-Llama", "float32", "cpu")
    assert (content["rounds"], content["seed"], content["layers"], content["deepest_layer"]) == (2, 7, 3, 1)
    assert content["heads"] == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0"]
    assert [case["documents"] for case in content["results"]] == [2, 3]
    assert "memory" not in content
    for name, values in content["results"][0]["seconds"].items():
        assert name in out and 0 < values["low"] <= values["median"] <= values["high"]
    assert "tap_overhead" in out and "icr_two_pass / heads_parallel_warm" in out
    assert "cache hits 6, misses 0" in out


def test_who_is_left_out_is_told_with_the_reason(saved: Path) -> None:
    out, content = run(saved, "--documents", "120", "--contestants", "floor,heads_parallel_cold")
    reason = content["results"][0]["skipped"]["floor"]
    assert f"120 documents: floor left out: {reason}" in out
    assert list(content["results"][0]["seconds"]) == ["heads_parallel_cold"]


def test_heads_are_given_or_spread_or_the_banks(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = ["--documents", "2", "--contestants", "floor"]
    assert run(saved, *fast, "--heads", "L2H3, L0H1")[1]["heads"] == ["L2H3", "L0H1"]
    assert run(saved, *fast, "--deepest", "2")[1]["heads"] == ["L0H0", "L0H1", "L1H2", "L1H3", "L2H0"]
    info = load_runner(str(saved), dtype="float32", device="cpu").info
    asked: list[Any] = []

    def open_bank(root: Any, found: Any) -> Any:
        asked.append(root)
        return bank_of(info, (HeadId(1, 2),))

    monkeypatch.setattr(heads_module, "open_bank", open_bank)
    assert run(saved, *fast, "--layers-from-bank", "--bank", "banks")[1]["heads"] == ["L1H2"]
    assert asked == [Path("banks")]


def test_memory_is_measured_for_who_took_part(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[Any] = []

    def measure_apart(task: Any) -> dict[str, Any]:
        tasks.append(task)
        described = {"documents": task.documents, "contestant": task.contestant}
        if task.contestant == "floor":
            return described | {"skipped": "no one knows"}
        return described | {"peak_extra_bytes": 5 << 20, "kv_bytes": 1 << 20, "without_kv_bytes": 4 << 20}

    monkeypatch.setattr(bench_memory, "measure_apart", measure_apart)
    out, content = run(saved, "--documents", "2", "--contestants", "floor,icr", "--memory", "--threads", "1")
    assert [(t.contestant, t.documents, t.model, t.threads) for t in tasks] == [
        ("floor", 2, str(saved), 1),
        ("icr", 2, str(saved), 1),
    ]
    assert [row["contestant"] for row in content["memory"]] == ["floor", "icr"]
    assert content["memory"][1]["without_kv_bytes"] == 4 << 20
    assert "memory of floor not measured: no one knows" in out


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--documents", "10,many"], "documents"),
        (["--documents", "0"], "documents"),
        (["--documents", ""], "documents"),
        (["--heads", "L1"], "heads"),
        (["--heads", "L1H1", "--deepest", "2"], "heads"),
        (["--heads", "L9H0"], "heads"),
        (["--deepest", "3"], "deepest"),
        (["--contestants", "nobody"], "contestants"),
        (["--json", "/nowhere/bench.json"], "json"),
        (["--model", "fake"], "model"),
    ],
)
def test_bad_options_are_refused_by_name(saved: Path, arguments: list[str], field: str) -> None:
    with pytest.raises(InputError) as caught:
        run(saved, *arguments)
    assert caught.value.field == field
