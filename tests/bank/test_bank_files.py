"""Writing and reading banks: round trips, damage, crashes."""

import json
import math
import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import headbank.bank as banks
from headbank.bank import MANIFEST, MAPS, Bank
from headbank.bank import files as bank_files
from headbank.errors import BankError
from tests.bank.sample_bank import all_heads_set, model_info, sample_bank, weighted_set


def assert_same(left: Bank, right: Bank) -> None:
    assert left.info == right.info
    assert left.head_sets == right.head_sets
    assert left.fusions == right.fusions
    assert left.defaults == right.defaults
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
    content["sha256"] = bank_files._sha256(bank_files._dump(content))
    (folder / MANIFEST).write_bytes(bank_files._dump(content))


def test_round_trip_keeps_every_value(tmp_path: Path) -> None:
    bank = sample_bank()
    folder = banks.write(bank, tmp_path / "new" / "root")
    assert folder == tmp_path / "new" / "root" / "tiny-model"
    assert_same(banks.read(folder), bank)
    heads = banks.read(folder).head_sets["expert.query.joint"]
    assert str(heads.heads[0]) == "L4H1"
    assert heads.dev_metrics["ndcg_at_2"] == 0.1 + 0.2


def _doubles(count: int) -> list[float]:
    """Finite doubles of every magnitude: random bits, then the awkward ones."""
    bits = random.Random(0)
    drawn = (struct.unpack("<d", bits.randbytes(8))[0] for _ in range(count * 2))
    extremes = [0.1 + 0.2, -0.0, 5e-324, 1.7976931348623157e308, 1e16, 1e22, 1e-5]
    return [x for x in drawn if math.isfinite(x)][: count - len(extremes)] + extremes


def test_round_trip_is_exact_for_any_number(tmp_path: Path) -> None:
    numbers = _doubles(2000)
    n = len(all_heads_set().heads)
    heads = replace(
        all_heads_set(),
        z_mean=tuple(numbers[-n:]),
        z_std=tuple(abs(x) or 1.0 for x in numbers[:n]),
        weights=tuple(numbers[n : 2 * n]),
        platt=(0.1 + 0.2, -0.0),
        dev_metrics={
            "many": numbers,
            "whole": [0, -1, 2**53 + 1, 2**70],
            "words": ["", "ü", "\u2028", "1.0"],
        },
    )
    folder = banks.write(sample_bank(head_sets=sample_bank().head_sets | {heads.name: heads}), tmp_path / "a")
    read = banks.read(folder)
    # repr tells 0.0 from -0.0, tuples from lists, and named tuples and dataclasses from plain ones.
    assert repr(read.head_sets[heads.name]) == repr(heads)
    assert files(banks.write(read, tmp_path / "b")) == files(folder)


def test_whole_numbers_among_floats_are_written_as_floats(tmp_path: Path) -> None:
    heads = replace(weighted_set(), exponent=1, z_mean=(0, 1), platt=(1, 0))
    folder = banks.write(sample_bank(head_sets=sample_bank().head_sets | {heads.name: heads}), tmp_path / "a")
    written = json.loads((folder / MANIFEST).read_text())["head_sets"][heads.name]
    assert repr([written["exponent"], written["z_mean"], written["platt"]]) == "[1.0, [0.0, 1.0], [1.0, 0.0]]"
    assert files(banks.write(banks.read(folder), tmp_path / "b")) == files(folder)


def test_types_come_back_as_they_were(tmp_path: Path) -> None:
    bank = sample_bank()
    read = banks.read(banks.write(bank, tmp_path))
    for name, heads in bank.head_sets.items():
        # Records come back in sorted order, which repr would show.
        assert repr(replace(read.head_sets[name], dev_metrics={})) == repr(replace(heads, dev_metrics={}))
    assert repr(read.fusions) == repr(bank.fusions)
    assert repr(read.info) == repr(bank.info)
    assert str(read.head_sets["weighted.query.parallel"].style) == "parallel+unlabelled+query-first+far-tail"


def test_equal_banks_are_equal_bytes(tmp_path: Path) -> None:
    first = banks.write(sample_bank(), tmp_path / "a")
    bank = sample_bank()
    backwards = sample_bank(
        maps=dict(reversed(bank.maps.items())),
        head_sets=dict(reversed(bank.head_sets.items())),
        defaults=dict(reversed(bank.defaults.items())),
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
    assert json.loads(raw)["head_sets"]["expert.query.joint"]["heads"] == [[4, 1], [2, 3], [5, 0]]


def test_maps_that_share_memory_or_are_strided_can_be_written(tmp_path: Path) -> None:
    cells = torch.arange(24, dtype=torch.float32)
    maps = {"x.query.joint.a": cells.reshape(4, 6).T, "x.query.joint.b": cells.reshape(6, 4)}
    read = banks.read(banks.write(sample_bank(maps=maps), tmp_path)).maps
    assert torch.equal(read["x.query.joint.a"], maps["x.query.joint.a"])
    assert torch.equal(read["x.query.joint.b"], maps["x.query.joint.b"])


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
    record = {"bytes": len(raw), "sha256": bank_files._sha256(raw)}
    resealed(folder, lambda manifest: manifest["files"].update({MAPS: record}))


def _nan_in_maps(folder: Path) -> None:
    raw = save({"expert.query.joint.soft": torch.full((6, 4), float("nan"))})
    (folder / MAPS).write_bytes(raw)
    record = {"bytes": len(raw), "sha256": bank_files._sha256(raw)}
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
    "truncated maps": (_truncate, rf"{MAPS}: the file has 3867 bytes, the manifest says 3872"),
    "flipped byte": (_flip, rf"{MAPS}: its SHA-256 differs"),
    "maps missing": (lambda folder: (folder / MAPS).unlink(), rf"{MAPS}: the file is missing"),
    "maps not safetensors": (_not_safetensors, rf"{MAPS}: not a safetensors file"),
    "NaN in maps": (_nan_in_maps, r"map expert.query.joint.soft: a value is not a finite number"),
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
    "manifest with a huge number": (
        _replace("0.75", "1e999"),
        rf"{MANIFEST}: not valid JSON: a number is too",
    ),
    "manifest nested too deep": (
        lambda folder: (folder / MANIFEST).write_text("[" * 100_000),
        rf"{MANIFEST}: not valid JSON",
    ),
    "manifest with NaN": (_replace("0.75", "NaN"), rf"{MANIFEST}: not valid JSON: NaN is not a JSON number"),
    "manifest not an object": (
        lambda folder: (folder / MANIFEST).write_text("[]"),
        rf"{MANIFEST}: not a JSON object",
    ),
    "newer schema": (
        _replace('"schema_version": 2', '"schema_version": 3'),
        r"schema_version is 3, this program reads 2$",
    ),
    "no schema": (_seal(lambda manifest: manifest.pop("schema_version")), r"schema_version is None"),
    "unknown field": (_seal(lambda manifest: manifest.update(extra=1)), rf"{MANIFEST}: extra: "),
    "missing field": (_seal(lambda manifest: manifest.pop("fusions")), rf"{MANIFEST}: fusions: "),
    "unknown field of a set": (
        _seal(lambda manifest: manifest["head_sets"]["expert.query.joint"].update(layout="joint")),
        rf"{MANIFEST}: head_sets.expert.query.joint.layout: ",
    ),
    "unknown field of a style": (
        _seal(lambda manifest: manifest["head_sets"]["expert.query.joint"]["style"].update(colour=1)),
        rf"{MANIFEST}: head_sets.expert.query.joint.style.colour: ",
    ),
    "default of an unknown view": (
        _seal(lambda manifest: manifest["defaults"].update(answer="expert.query.joint")),
        rf"{MANIFEST}: defaults.answer.",
    ),
    "number as text": (
        _seal(lambda manifest: manifest["model"].update(n_layers="6")),
        rf"{MANIFEST}: model.n_layers: ",
    ),
    "unknown view": (
        _seal(lambda manifest: manifest["head_sets"]["expert.query.joint"].update(view="answer")),
        rf"{MANIFEST}: head_sets.expert.query.joint.view: ",
    ),
    "no file record": (
        _seal(lambda manifest: manifest["files"].clear()),
        rf"{MANIFEST}: files has no entry for {MAPS}",
    ),
    "head outside": (
        _seal(lambda manifest: manifest["head_sets"]["expert.query.joint"].update(heads=[[6, 0], [0, 1]])),
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


@pytest.mark.parametrize("version", [1, 0, -1])
def test_a_bank_of_an_older_version_is_refused_with_the_way_out(tmp_path: Path, version: int) -> None:
    folder = banks.write(sample_bank(), tmp_path)
    resealed(folder, lambda manifest: manifest.update(schema_version=version, layout="joint"))
    with pytest.raises(BankError) as caught:
        banks.read(folder)
    assert str(caught.value) == (
        f"{folder / MANIFEST}: schema_version is {version}, this program reads 2; the bank is too old: delete its "
        f"folder and recalibrate with: headrank calibrate --model MODEL --bank {tmp_path} --data FILE"
    )


def test_an_invalid_bank_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(BankError, match=r"head_sets: a bank needs at least one"):
        banks.write(sample_bank(head_sets={}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_values_outside_the_schema_are_never_written(tmp_path: Path) -> None:
    style = replace(weighted_set().style, tail="nowhere")
    heads = replace(weighted_set(), style=style)
    with pytest.raises(BankError, match=r"schema: head_sets.weighted.query.parallel.style.tail: "):
        banks.write(sample_bank(head_sets=sample_bank().head_sets | {heads.name: heads}), tmp_path)
    assert list(tmp_path.iterdir()) == []


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

    monkeypatch.setattr(bank_files, step, crash)
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
        patch.setattr(bank_files, "_write_synced", crash)
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
