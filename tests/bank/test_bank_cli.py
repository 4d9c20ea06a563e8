"""`headrank bank`."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import headbank.bank as banks
from headbank.bank import MANIFEST, MAPS
from headbank.cli.bank import bank_app
from headbank.errors import BankError, InputError
from headbank.types import HeadId, ModelInfo, PromptStyle
from tests.bank.sample_bank import HEADS, LAYERS, expert_set, fusion, model_info, sample_bank


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
    rows = [
        [cell.strip() for cell in line.strip("│┃").split("│")]
        for line in output.replace("┃", "│").splitlines()
    ]
    (row,) = [row for row in rows if row[0] == first and len(row) > 1]
    return row


def section(output: str, title: str) -> str:
    """The table under the first line that begins with `title`, up to its lower edge."""
    lines = output.splitlines()
    (first, *_) = [i for i, line in enumerate(lines) if line.startswith(title)]
    last = next(i for i in range(first, len(lines)) if lines[i].startswith("└"))
    return "\n".join(lines[first:last])


def test_show_prints_identity_and_record(tmp_path: Path) -> None:
    banks.write(
        sample_bank(training=sample_bank().training | {"sample_ids": [f"s{i}" for i in range(9)]}), tmp_path
    )
    status, output = run("show", tmp_path)
    assert status == 0
    assert cells(output, "model") == ["model", "Owner/Tiny-Model"]
    assert cells(output, "layers") == ["layers", "6"]
    assert cells(output, "sample_ids") == ["sample_ids", "9 entries"]
    assert cells(output, "thresholds") == ["thresholds", '{"tau_f": 0.6, "tau_p": 0.9}']


def test_show_prints_the_defaults_and_what_they_were_chosen_from(folder: Path) -> None:
    output = section(run("show", folder)[1], "Defaults")
    assert cells(output, "query") == [
        "query",
        "weighted.query.parallel",
        "parallel+unlabelled+query-first+far-tail",
        "evidence",
    ]
    assert cells(output, "response") == ["response", "expert.response.joint", "joint", "borda"]
    output = section(run("show", folder)[1], "query view: chosen from")
    assert cells(output, "name") == ["name", "NDCG@2", "note"]
    assert cells(output, "weighted.query.parallel") == ["weighted.query.parallel", "0.750 [0.700, 0.812]", ""]
    assert cells(output, "expert.query.joint") == ["expert.query.joint", "0.500 [0.400, 0.600]", "x"]


@pytest.mark.parametrize("choice", [None, "paper", {"query": "paper"}, {"query": []}])
def test_show_needs_no_choice(tmp_path: Path, choice: object) -> None:
    banks.write(sample_bank(training={"choice": choice} if choice else {}), tmp_path)
    status, output = run("show", tmp_path)
    assert status == 0
    assert "chosen from" not in output


def test_show_prints_every_head_set_and_fusion(folder: Path) -> None:
    output = section(run("show", folder)[1], "Head sets")
    assert cells(output, "expert.query.joint") == [
        *("expert.query.joint", "L4H1 L2H3 L5H0", "2 of 3", "borda", "1", "no", "no")
    ]
    assert cells(output, "weighted.query.parallel") == [
        *("weighted.query.parallel", "L4H1 L0H0", "", "evidence", "0.5", "yes", "1.25, -2")
    ]
    eight = "L0H0 L0H1 L0H2 L0H3 L1H0 L1H1 L1H2 L1H3"
    assert cells(output, "icr.query.joint")[1:4] == [f"{eight} and 16 more", "", "calibrated"]
    output = section(run("show", folder)[1], "Fusions")
    assert cells(output, "fusion.query.parallel") == [
        "fusion.query.parallel",
        "weighted.query.parallel 0.6, bm25 0.3, dense 0.2",
        "all-minilm-l6-v2",
        "1.5, -1",
    ]


def test_show_prints_the_voters_of_the_defaults(folder: Path) -> None:
    output = section(run("show", folder)[1], "expert.response.joint")
    # f of head (l, h) in the first placement, the worst of the sample bank, is (4 l + h) / 71.
    assert cells(output, "L4H1")[:4] == ["L4H1", "yes", "1", f"{17 / 71:.4f}"]
    assert cells(output, "L5H0")[:4] == ["L5H0", "no", "1", f"{20 / 71:.4f}"]
    output = section(run("show", folder)[1], "expert.response.joint by layer")
    assert cells(output, "2") == ["2", "4", "█░░░"]
    assert cells(output, "5") == ["5", "1", "█"]
    output = section(run("show", folder)[1], "expert.response.joint: dev metrics")
    assert cells(output, "ndcg_at_2") == ["ndcg_at_2", "0.3"]
    # The other default has weights, and the bank has no maps of its layout.
    output = section(run("show", folder)[1], "weighted.query.parallel")
    assert cells(output, "L0H0") == ["L0H0", "no", "-0.1000"]


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
    assert run("verify", folder) == (0, "ok: Owner/Tiny-Model, 4 head sets, 10 maps\n")


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
    assert (status, output) == (0, "ok: Owner/Tiny-Model, 4 head sets, 10 maps, fits the model\n")
    assert asked == ["some-model"]


def test_verify_with_another_model_names_the_field(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant_loader(monkeypatch, model_info(template_hash="other"))
    status, output = run("verify", folder, "--model", "some-model")
    assert status == 1
    assert output.startswith(
        "bad: the bank does not fit the model: template_hash is 'other', the bank has '7e3a'"
    )
    assert output.count("\n") == 1


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the head sets that were drawn, in the place of the pictures."""
    names: list[str] = []
    module = ModuleType("headbank.jobs.plots")
    module.head_map = lambda bank, heads, path: names.append(heads.name)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headbank.jobs.plots", module)
    return names


def test_plot_writes_a_picture(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "pictures" / "heads.png"
    assert run("plot", folder, "--view", "response", "--out", out) == (0, f"wrote {out}\n")
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_marks_a_named_set(folder: Path, tmp_path: Path, drawn: list[str]) -> None:
    assert run("plot", folder, "--set", "icr.query.joint", "--out", tmp_path / "x.png")[0] == 0
    assert drawn == ["icr.query.joint"]


@pytest.mark.parametrize(
    ("default", "with_maps", "expected"),
    [
        ("expert.query.joint", ("joint", "parallel"), "expert.query.joint"),
        ("expert.query.parallel", ("joint", "parallel"), "expert.query.parallel"),
        ("expert.query.parallel", ("joint",), "expert.query.joint"),
        ("expert.query.joint", ("parallel",), "expert.query.parallel"),
        (None, ("joint", "parallel"), "expert.query.joint"),
    ],
)
def test_plot_draws_the_experts_of_the_default_layout_or_the_one_that_has_maps(
    tmp_path: Path, drawn: list[str], default: str | None, with_maps: tuple[str, ...], expected: str
) -> None:
    joint = expert_set("query")
    parallel = replace(joint, name="expert.query.parallel", style=PromptStyle("parallel"))
    bank = sample_bank(
        head_sets={joint.name: joint, parallel.name: parallel},
        fusions={},
        defaults={"query": default} if default else {},
        maps={f"expert.query.{layout}.frequency": torch.zeros(1, LAYERS, HEADS) for layout in with_maps},
    )
    banks.write(bank, tmp_path)
    assert run("plot", tmp_path, "--view", "query", "--out", tmp_path / "x.png")[0] == 0
    assert drawn == [expected]


def test_plot_names_what_is_missing(tmp_path: Path, drawn: list[str]) -> None:
    banks.write(sample_bank(maps={}), tmp_path)
    with pytest.raises(
        BankError, match=r"no maps of expert.query.parallel or expert.query.joint; name a head set"
    ):
        run("plot", tmp_path, "--view", "query", "--out", tmp_path / "x.png")
    with pytest.raises(BankError, match=r"no such head set; it has: expert.query.joint, "):
        run("plot", tmp_path, "--set", "qr.query.joint", "--out", tmp_path / "x.png")
    assert drawn == []


@pytest.mark.parametrize("options", [(), ("--view", "query", "--set", "icr.query.joint")])
def test_plot_takes_a_view_or_a_set(folder: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"^set: give either --view or --set$"):
        run("plot", folder, *options, "--out", tmp_path / "x.png")


def test_plot_knows_two_views(folder: Path, tmp_path: Path) -> None:
    status, output = run("plot", folder, "--view", "answer", "--out", tmp_path / "x.png")
    assert status == 2
    assert "'query', 'response'" in output


def test_diff_of_equal_banks(folder: Path, tmp_path: Path) -> None:
    other = banks.write(sample_bank(maps={}), tmp_path / "other")
    assert run("diff", folder, other) == (0, "no difference in model, defaults, head sets and fusions\n")


def test_diff_prints_both_sides(folder: Path, tmp_path: Path) -> None:
    norms = ("n0", "n1", "n2", "x3", "n4", "x5")
    few = replace(expert_set("query"), heads=(HeadId(4, 1), HeadId(1, 1)), style=PromptStyle(label=False))
    everything = sample_bank().head_sets | {few.name: few}
    del everything["icr.query.joint"]
    bank = sample_bank(
        info=model_info(norm_hashes=norms, d_model=64),
        head_sets=everything,
        fusions={fusion().name: replace(fusion(), weights=(0.6, 0.3, 0.123456))},
        defaults={"query": "expert.query.joint"},
    )
    status, output = run("diff", folder, banks.write(bank, tmp_path / "other"))
    assert status == 0
    expected = [
        ("model: d_model", "32", "64", ""),
        ("model: norm_hashes", "n3", "x3", "2 of 6 values differ, the first is number 3 from 0"),
        ("default: query", "weighted.query.parallel", "expert.query.joint", ""),
        ("default: response", "expert.response.joint", "-", ""),
        ("head set expert.query.joint: heads", "L4H1 L2H3 L5H0", "L4H1 L1H1", "Jaccard 0.25"),
        ("head set expert.query.joint: style", "joint", "joint+unlabelled", ""),
        ("head set icr.query.joint", "icr.query.joint", "-", ""),
        (
            "fusion fusion.query.parallel: weights",
            *("0.2", "0.1235", "1 of 3 values differ, the first is number 2 from 0"),
        ),
    ]
    for row in expected:
        assert tuple(cells(output, row[0])) == row
    assert len([line for line in output.splitlines() if line.startswith("│")]) == len(expected)


def test_diff_says_which_bank_is_missing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BankError, match=r"nowhere: no head bank here"):
        run("diff", folder, tmp_path / "nowhere")
