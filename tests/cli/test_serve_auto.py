"""`headrank serve --auto-calibrate`: a model without a bank gets one, and no other model does."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headbank import bank as banks
from headbank.cli import app, auto
from headbank.data.synthetic import synthetic_hash
from headbank.errors import BankError, EngineError, ModelError
from headbank.models.fake import FAKE_HEAD_SETS, FakeRunner
from headbank.rerankers.heads import open_bank
from headbank.types import HeadId
from service.settings import Settings
from tests.support.banks import bank_of_sets
from tests.support.tiny_models import tiny_model, tiny_tokenizer

Serve = Callable[..., Settings]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Runs `headrank serve` up to the server, and gives the settings that it would run with."""
    seen: list[Settings] = []
    monkeypatch.setattr("service.server.serve", seen.append)

    def run(*flags: str) -> Settings:
        result = CliRunner().invoke(app, ["serve", *flags], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return seen[-1]

    return run


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home folder of one's own, also for processes that are started."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def record(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(next(root.glob("*/manifest.json")).read_text())
    return content


def test_a_bank_is_made_once_and_then_found(served: Serve, tmp_path: Path) -> None:
    root = tmp_path / "banks"
    flags = ("--model", "fake", "--bank", str(root), "--auto-calibrate", "--auto-calibrate-samples", "3")
    assert served(*flags).bank == root
    found = record(root)
    assert set(found["defaults"]) == {"query"}
    assert {name.split(".", 1)[1] for name in found["head_sets"]} == {"query.parallel"}
    assert list(found["fusions"]) == ["fusion.query.parallel"]
    assert found["training"]["data_sha256"] == synthetic_hash(3, 0, 10)
    assert "curves" not in found["training"]
    before = next(root.glob("*/manifest.json")).stat().st_mtime_ns
    assert served(*flags).bank == root
    assert next(root.glob("*/manifest.json")).stat().st_mtime_ns == before
    banks.check(open_bank(root, FakeRunner().info), FakeRunner().info)


def test_a_default_view_of_the_response_has_heads_too(tmp_path: Path) -> None:
    assert auto._find_or_make("fake", tmp_path, "response", 3, "auto", "auto", None) == tmp_path
    assert set(record(tmp_path)["defaults"]) == {"query", "response"}


def test_a_model_that_has_a_bank_keeps_it(home: Path) -> None:
    # The fake engine's own bank stands for those inside the package.
    assert auto._find_or_make("fake", None, "query", 3, "auto", "auto", None) is None
    assert not home.exists()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that no package has a bank for."""
    folder = tmp_path_factory.mktemp("models") / "Tiny-Llama"
    model = copy.deepcopy(tiny_model("llama"))
    model.config.max_position_embeddings = 16384
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_without_a_folder_the_bank_goes_to_the_users(home: Path, tiny: Path, monkeypatch: Any) -> None:
    made: list[Any] = []

    def run_calibration(runner: Any, source: Any, root: Path, config: Any, **options: Any) -> None:
        made.append((runner.info.n_layers, len(source.samples), root, config.styles[0].layout))
        banks.write(bank_of_sets(runner.info, [replace(FAKE_HEAD_SETS[0], heads=(HeadId(0, 0),))]), root)

    monkeypatch.setattr(auto, "run_calibration", run_calibration)
    arguments: Any = (str(tiny), None, "query", 5, "float32", "cpu", None)
    folder = home / ".cache" / "headrank" / "banks"
    assert auto._find_or_make(*arguments) == folder
    assert made == [(3, 5, folder, "parallel")]
    assert auto._find_or_make(*arguments) == folder
    assert len(made) == 1


def test_the_bank_of_another_model_is_neither_used_nor_replaced(tmp_path: Path) -> None:
    other = replace(FakeRunner().info, template_hash="older")
    folder = banks.write(bank_of_sets(other, FAKE_HEAD_SETS), tmp_path)
    before = (folder / banks.MANIFEST).read_bytes()
    with pytest.raises(BankError, match=r"another model \(template_hash\)"):
        auto._find_or_make("fake", tmp_path, "query", 3, "auto", "auto", None)
    assert (folder / banks.MANIFEST).read_bytes() == before


def test_errors_come_back_from_the_process(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        auto.ensure_bank(str(tmp_path / "no-such-model"), tmp_path, "query", 3, "auto", "cpu", None)


def _die(*_: Any) -> None:
    os._exit(9)


def test_a_calibration_that_is_killed_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(auto, "_find_or_make", _die)
    with pytest.raises(EngineError, match="enough memory"):
        auto.ensure_bank("fake", tmp_path, "query", 3, "auto", "cpu", None)


def test_sigterm_ends_the_calibration_too(tmp_path: Path) -> None:
    code = "from headbank.cli import main; main()"
    flags = [
        "--model",
        "fake",
        "--bank",
        str(tmp_path),
        "--auto-calibrate",
        "--auto-calibrate-samples",
        "5000",
    ]
    process = subprocess.Popen([sys.executable, "-c", code, "serve", *flags], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".captures/*/*.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    shards = len(list(tmp_path.glob(".captures/*/*.safetensors")))
    time.sleep(1)
    assert len(list(tmp_path.glob(".captures/*/*.safetensors"))) == shards
    assert not list(tmp_path.glob("*/manifest.json"))


@pytest.mark.parametrize("bank", [None, "/some/banks"])
def test_without_the_flag_the_error_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, home: Path, bank: str | None
) -> None:
    def serve(_: Settings) -> None:
        raise BankError("no head bank for this model")

    monkeypatch.setattr("service.server.serve", serve)
    flags = ["--bank", bank] if bank else []
    with pytest.raises(BankError) as caught:
        CliRunner().invoke(app, ["serve", "--model", "Org/M", *flags], catch_exceptions=False)
    root = bank or home / ".cache" / "headrank" / "banks"
    assert str(caught.value) == (
        "no head bank for this model; without labelled questions: "
        f"headrank calibrate --model Org/M --bank {root} --data synthetic, then "
        f"headrank serve --model Org/M --bank {root}; "
        "or both at once: headrank serve --model Org/M --auto-calibrate"
    )


def test_the_flags_have_variables(monkeypatch: pytest.MonkeyPatch, served: Serve, tmp_path: Path) -> None:
    asked: list[Any] = []

    def ensure_bank(*arguments: Any) -> Path:
        asked.append(arguments)
        return tmp_path

    monkeypatch.setattr("headbank.cli.serve.ensure_bank", ensure_bank)
    assert served("--model", "fake").bank is None
    assert asked == []
    monkeypatch.setenv("HEADRANK_AUTO_CALIBRATE", "1")
    monkeypatch.setenv("HEADRANK_AUTO_CALIBRATE_SAMPLES", "7")
    found = served("--model", "fake", "--threads", "2")
    assert (found.bank, found.model, found.threads) == (tmp_path, "fake", 2)
    assert asked == [("fake", None, "query", 7, "auto", "auto", 2)]
