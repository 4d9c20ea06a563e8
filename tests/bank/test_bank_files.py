"""Writing and reading banks: round trips, damage, crashes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import headbank.bank as banks
from headbank.bank import MANIFEST, MAPS, Bank
from headbank.errors import BankError
from headbank.types import HeadId, HeadSet
from tests.bank.sample_bank import model_info, sample_bank


def assert_same(left: Bank, right: Bank) -> None:
    assert left.info == right.info
    assert left.layout == right.layout
    assert left.head_sets == right.head_sets
    assert left.training == right.training
    assert left.maps.keys() == right.maps.keys()
    for name, values in left.maps.items():
        assert values.dtype == right.maps[name].dtype
        assert torch.equal(values, right.maps[name]), name


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and write it with a hash that is right again."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    change(content)
    content["sha256"] = banks._sha256(banks._dump(content))
    (folder / MANIFEST).write_bytes(banks._dump(content))


def test_round_trip_keeps_every_value(tmp_path: Path) -> None:
    bank = sample_bank()
    folder = banks.write(bank, tmp_path / "new" / "root")
    assert folder == tmp_path / "new" / "root" / "tiny-model"
    assert_same(banks.read(folder), bank)
    heads = banks.read(folder).head_sets["expert_query"]
    assert str(heads.heads[0]) == "L4H1"
    assert heads.dev_metrics["ndcg_at_2"] == 0.1 + 0.2


def test_equal_banks_are_equal_bytes(tmp_path: Path) -> None:
    first = banks.write(sample_bank(), tmp_path / "a")
    bank = sample_bank()
    backwards = sample_bank(
        maps=dict(reversed(bank.maps.items())),
        head_sets=dict(reversed(bank.head_sets.items())),
        training=dict(reversed(bank.training.items())),
    )
    second = banks.write(backwards, tmp_path / "b")
    assert files(first) == files(second)
    third = banks.write(banks.read(first), tmp_path / "a")
    assert files(third) == files(second)
    assert set(files(third)) == {MANIFEST, MAPS}


def test_manifest_is_sorted_and_ends_with_a_newline(tmp_path: Path) -> None:
    raw = (banks.write(sample_bank(), tmp_path) / MANIFEST).read_text()
    assert raw.endswith("}\n")
    assert raw == json.dumps(json.loads(raw), sort_keys=True, indent=1) + "\n"
    assert json.loads(raw)["head_sets"]["expert_query"]["heads"] == [[4, 1], [2, 3], [5, 0]]


def test_maps_that_share_memory_or_are_strided_can_be_written(tmp_path: Path) -> None:
    cells = torch.arange(24, dtype=torch.float32)
    maps = {"x.query.a": cells.reshape(4, 6).T, "x.query.b": cells.reshape(6, 4)}
    read = banks.read(banks.write(sample_bank(maps=maps), tmp_path)).maps
    assert torch.equal(read["x.query.a"], maps["x.query.a"])
    assert torch.equal(read["x.query.b"], maps["x.query.b"])


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        folder = banks.write(sample_bank(), tmp_path)
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / MAPS).stat().st_mode & 0o777 == 0o644


def _truncate(folder: Path) -> None:
    (folder / MAPS).write_bytes((folder / MAPS).read_bytes()[:-5])


def _flip(folder: Path) -> None:
    raw = bytearray((folder / MAPS).read_bytes())
    raw[-9] ^= 1
    (folder / MAPS).write_bytes(raw)


def _not_safetensors(folder: Path) -> None:
    raw = b"\xff" * 64
    (folder / MAPS).write_bytes(raw)
    record = {"bytes": len(raw), "sha256": banks._sha256(raw)}
    resealed(folder, lambda manifest: manifest["files"].update({MAPS: record}))


def _nan_in_maps(folder: Path) -> None:
    raw = save({"expert.query.soft": torch.full((6, 4), float("nan"))})
    (folder / MAPS).write_bytes(raw)
    record = {"bytes": len(raw), "sha256": banks._sha256(raw)}
    resealed(folder, lambda manifest: manifest["files"].update({MAPS: record}))


def _replace(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / MANIFEST).read_text()
        assert old in text
        (folder / MANIFEST).write_text(text.replace(old, new, 1))

    return change


def _seal(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: resealed(folder, change)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated maps": (_truncate, rf"{MAPS}: the file has 3803 bytes, the manifest says 3808"),
    "flipped byte": (_flip, rf"{MAPS}: its SHA-256 differs"),
    "maps missing": (lambda folder: (folder / MAPS).unlink(), rf"{MAPS}: the file is missing"),
    "maps not safetensors": (_not_safetensors, rf"{MAPS}: not a safetensors file"),
    "NaN in maps": (_nan_in_maps, r"map expert.query.soft: a value is not a finite number"),
    "manifest missing": (lambda folder: (folder / MANIFEST).unlink(), rf"{MANIFEST}: the file is missing"),
    "manifest edited": (
        _replace('"strict_experts": 2', '"strict_experts": 3'),
        rf"{MANIFEST}: the file was edited",
    ),
    "manifest not JSON": (_replace("{", "[["), rf"{MANIFEST}: not valid JSON"),
    "manifest not UTF-8": (
        lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe\xfa"),
        rf"{MANIFEST}: not valid JSON",
    ),
    "manifest with NaN": (_replace("0.75", "NaN"), rf"{MANIFEST}: not valid JSON: NaN is not a JSON number"),
    "manifest not an object": (
        lambda folder: (folder / MANIFEST).write_text("[]"),
        rf"{MANIFEST}: not a JSON object",
    ),
    "newer schema": (
        _replace('"schema_version": 1', '"schema_version": 2'),
        r"schema_version is 2, this program reads 1$",
    ),
    "no schema": (_seal(lambda manifest: manifest.pop("schema_version")), r"schema_version is None"),
    "unknown field": (_seal(lambda manifest: manifest.update(extra=1)), rf"{MANIFEST}: extra: "),
    "missing field": (_seal(lambda manifest: manifest.pop("layout")), rf"{MANIFEST}: layout: "),
    "number as text": (
        _seal(lambda manifest: manifest["model"].update(n_layers="6")),
        rf"{MANIFEST}: model.n_layers: ",
    ),
    "unknown view": (
        _seal(lambda manifest: manifest["head_sets"]["expert_query"].update(view="answer")),
        rf"{MANIFEST}: head_sets.expert_query.view: ",
    ),
    "no file record": (
        _seal(lambda manifest: manifest["files"].clear()),
        rf"{MANIFEST}: files has no entry for {MAPS}",
    ),
    "head outside": (
        _seal(lambda manifest: manifest["head_sets"]["expert_query"].update(heads=[[6, 0], [0, 1]])),
        r"L6H0 is outside 6 layers x 4 heads",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    folder = banks.write(sample_bank(), tmp_path)
    damage(folder)
    with pytest.raises(BankError, match=message) as caught:
        banks.read(folder)
    assert str(folder) in str(caught.value)


def test_resealing_alone_damages_nothing(tmp_path: Path) -> None:
    folder = banks.write(sample_bank(), tmp_path)
    resealed(folder, lambda manifest: None)
    assert_same(banks.read(folder), sample_bank())


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BankError, match=r"nowhere: no such folder"):
        banks.read(tmp_path / "nowhere")


QUERY = sample_bank().head_sets["expert_query"]
FREQUENCY = sample_bank().maps["expert.query.frequency"]


def _set(**changes: Any) -> dict[str, Any]:
    fields = {name: getattr(QUERY, name) for name in QUERY.__dataclass_fields__}
    return {"head_sets": {"expert_query": HeadSet(**(fields | changes))}}


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "layer outside": (_set(heads=(HeadId(6, 0),), strict_experts=0), r"expert_query: L6H0 is outside"),
    "head outside": (_set(heads=(HeadId(0, 4),), strict_experts=0), r"expert_query: L0H4 is outside"),
    "negative head": (_set(heads=(HeadId(0, -1),), strict_experts=0), r"expert_query: L0H-1 is outside"),
    "duplicate": (_set(heads=(HeadId(1, 1), HeadId(1, 1))), r"expert_query: a head is named twice"),
    "no heads": (_set(heads=(), strict_experts=0), r"expert_query: it has no heads"),
    "too many experts": (_set(strict_experts=4), r"strict_experts is 4, the set has 3 heads"),
    "negative experts": (_set(strict_experts=-1), r"strict_experts is -1"),
    "other key": ({"head_sets": {"other": QUERY}}, r"head set other: its own name differs"),
    "NaN metric": (
        _set(dev_metrics={"p": {"q": [1.0, float("nan")]}}),
        r"expert_query: dev_metrics.p.q\[1\] is not a",
    ),
    "inf in training": ({"training": {"tau": float("inf")}}, r"training.tau is not a finite number"),
    "number as key": (
        {"training": {"rejected": {1: 2}}},
        r"training.rejected has a key that is not a string",
    ),
    "object in training": (
        {"training": {"path": Path("x")}},
        r"training.path is a PosixPath, not a JSON value",
    ),
    "unknown layout": ({"layout": "spiral"}, r"schema: layout: "),
    "other shape": (
        {"maps": {"expert.query.soft": torch.zeros(3, 4, 6)}},
        r"shape \[3, 4, 6\] does not end in",
    ),
    "one dimension": (
        {"maps": {"expert.query.soft": torch.zeros(4)}},
        r"shape \[4\] does not end in \[L, H\]",
    ),
    "four dimensions": ({"maps": {"expert.query.soft": torch.zeros(1, 1, 6, 4)}}, r"does not end in"),
    "other placements": (
        {"maps": {"expert.query.frequency": FREQUENCY, "expert.query.soft": FREQUENCY[:2]}},
        r"map expert.query.soft: 2 placements",
    ),
    "half precision": ({"maps": {"x.query.a": torch.zeros(6, 4).half()}}, r"dtype torch.float16 is not"),
    "inf in maps": (
        {"maps": {"x.query.a": torch.full((6, 4), float("inf"))}},
        r"x.query.a: a value is not a",
    ),
}


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_bank_is_never_written(tmp_path: Path, kind: str) -> None:
    changes, message = INVALID[kind]
    with pytest.raises(BankError, match=message):
        banks.write(sample_bank(**changes), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_detectors_may_have_different_placements() -> None:
    maps = {"expert.query.frequency": FREQUENCY, "locos.query.interval": torch.zeros(2, 6, 4)}
    banks.validate(sample_bank(maps=maps))


OLD, NEW = sample_bank(), sample_bank(training={"seed": 1})


@pytest.mark.parametrize("failing", [1, 2])
def test_a_crash_in_a_rename_leaves_the_old_bank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    folder = banks.write(OLD, tmp_path)
    before = files(tmp_path)
    rename, calls = os.rename, 0

    def crash(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(28, "No space left on device")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crash)
        with pytest.raises(
            BankError, match=r"tiny-model: the bank could not be written: No space left on device"
        ):
            banks.write(NEW, tmp_path)
    assert calls >= failing
    assert files(tmp_path) == before
    assert os.listdir(tmp_path) == ["tiny-model"]
    assert_same(banks.read(folder), OLD)
    banks.write(NEW, tmp_path)
    assert_same(banks.read(folder), NEW)
    assert os.listdir(tmp_path) == ["tiny-model"]


@pytest.mark.parametrize("step", ["_write_synced", "_sync_folder"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_crash_before_the_rename_leaves_the_old_bank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    folder = banks.write(OLD, tmp_path)

    def crash(*_: object) -> None:
        raise error

    monkeypatch.setattr(banks, step, crash)
    with pytest.raises(BankError if isinstance(error, OSError) else KeyboardInterrupt):
        banks.write(NEW, tmp_path)
    assert os.listdir(tmp_path) == ["tiny-model"]
    assert_same(banks.read(folder), OLD)


def test_a_crash_of_the_first_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", crash)
    with pytest.raises(BankError, match="could not be written"):
        banks.write(NEW, tmp_path)
    assert os.listdir(tmp_path) == []


def test_killed_between_the_renames_the_old_bank_is_found_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = banks.write(OLD, tmp_path)
    parked = tmp_path / ".tiny-model.old"
    folder.rename(parked)
    assert banks.locate(tmp_path) == parked
    assert_same(banks.read(banks.find(tmp_path, model_info())), OLD)

    # The next write begins by putting it back, so that failing once more loses nothing.
    def crash(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(banks, "_write_synced", crash)
        with pytest.raises(BankError, match="could not be written"):
            banks.write(NEW, tmp_path)
    assert os.listdir(tmp_path) == ["tiny-model"]
    assert_same(banks.read(folder), OLD)


def test_killed_after_the_renames_the_new_bank_counts(tmp_path: Path) -> None:
    banks.write(OLD, tmp_path).rename(tmp_path / ".tiny-model.old")
    other = banks.write(NEW, tmp_path / "elsewhere")
    folder = tmp_path / "tiny-model"
    other.rename(folder)
    assert banks.locate(tmp_path) == folder
    assert banks.find(tmp_path, model_info(model_id="another-name")) == folder
    banks.write(NEW, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "tiny-model"]


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(BankError, match="could not be written"):
        banks.write(OLD, tmp_path / "root")
