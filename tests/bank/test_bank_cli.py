"""`headrank bank`."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

import headbank.bank as banks
from headbank.bank import MANIFEST, MAPS
from headbank.cli.bank import bank_app
from headbank.errors import BankError
from headbank.types import ModelInfo
from tests.bank.sample_bank import model_info, sample_bank


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return banks.write(sample_bank(), tmp_path)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(bank_app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def cells(output: str, first: str) -> list[str]:
    """The cells of the table row that begins with `first`."""
    rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in output.splitlines()]
    (row,) = [row for row in rows if row[0] == first and len(row) > 1]
    return row


def test_show_prints_identity_record_heads_and_layers(tmp_path: Path) -> None:
    bank = sample_bank()
    training = bank.training | {"sample_ids": [f"s{i}" for i in range(9)]}
    query_only = {"expert_query": bank.head_sets["expert_query"]}
    banks.write(sample_bank(training=training, head_sets=query_only), tmp_path)
    status, output = run("show", tmp_path)
    assert status == 0
    assert cells(output, "model") == ["model", "Owner/Tiny-Model"]
    assert cells(output, "layers") == ["layers", "6"]
    assert cells(output, "sample_ids") == ["sample_ids", "9 entries"]
    assert cells(output, "thresholds") == ["thresholds", '{"tau_f": 0.6, "tau_p": 0.9}']
    assert cells(output, "ndcg_at_2") == ["ndcg_at_2", "0.3"]
    # f of head (l, h) in the first placement, the worst of the sample bank, is (4 l + h) / 71.
    assert cells(output, "L4H1")[:3] == ["L4H1", "strict expert", f"{17 / 71:.4f}"]
    assert cells(output, "L5H0")[:3] == ["L5H0", "soft fill", f"{20 / 71:.4f}"]
    assert cells(output, "2") == ["2", "4", "█░░░"]
    assert cells(output, "5") == ["5", "1", "█"]


def test_show_works_without_maps(tmp_path: Path) -> None:
    banks.write(sample_bank(maps={}), tmp_path)
    status, output = run("show", tmp_path)
    assert status == 0
    assert "L2H3" in output


def test_show_json_is_the_manifest(folder: Path) -> None:
    assert run("show", folder, "--json") == (0, (folder / MANIFEST).read_text())


def test_show_of_nothing_is_a_bank_error(tmp_path: Path) -> None:
    with pytest.raises(BankError, match="no head bank here"):
        run("show", tmp_path)


def test_verify_says_ok_in_one_line(folder: Path) -> None:
    assert run("verify", folder) == (0, "ok: Owner/Tiny-Model, 2 head sets, 10 maps\n")


def test_verify_names_the_damaged_file_in_one_line(folder: Path) -> None:
    (folder / MAPS).unlink()
    assert run("verify", folder) == (1, f"bad: {folder / MAPS}: the file is missing\n")


def _plant_loader(monkeypatch: pytest.MonkeyPatch, info: ModelInfo) -> list[str]:
    """Put a loader in the place of the real one; returns the list of the models it is asked for."""
    asked: list[str] = []
    module = ModuleType("headbank.models.loading")
    module.load_runner = lambda model: asked.append(model) or SimpleNamespace(info=info)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headbank.models.loading", module)
    return asked


def test_verify_with_the_right_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _plant_loader(monkeypatch, model_info(dtype="bfloat16"))
    status, output = run("verify", folder, "--model", "some-model")
    assert (status, output) == (0, "ok: Owner/Tiny-Model, 2 head sets, 10 maps, fits the model\n")
    assert asked == ["some-model"]


def test_verify_with_another_model_names_the_field(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant_loader(monkeypatch, model_info(template_hash="other"))
    status, output = run("verify", folder, "--model", "some-model")
    assert status == 1
    assert output.startswith(
        "bad: the bank does not fit the model: template_hash is 'other', the bank has '7e3a'"
    )
    assert output.count("\n") == 1


def test_plot_writes_a_picture(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "pictures" / "heads.png"
    assert run("plot", folder, "--view", "response", "--out", out) == (0, f"wrote {out}\n")
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_knows_two_views(folder: Path, tmp_path: Path) -> None:
    status, output = run("plot", folder, "--view", "answer", "--out", tmp_path / "x.png")
    assert status == 2
    assert "'query', 'response'" in output
