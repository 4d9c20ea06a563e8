"""Which bank belongs to which model."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

import headbank.bank as banks
from headbank.bank import FINGERPRINT_FIELDS, MANIFEST
from headbank.errors import BankError, BankMismatch
from headbank.types import ModelInfo
from tests.bank.sample_bank import LAYERS, model_info, sample_bank

# What may differ: names and number formats, and what config_hash covers anyway.
FREE = {
    "model_id": "somebody/else",
    "revision": "r2",
    "dtype": "bfloat16",
    "d_head": 16,
    "context_tokens": 1024,
    "windows": (None,) * LAYERS,
}
MUTATED = {
    "config_hash": "dead",
    "n_layers": 7,
    "n_heads": 8,
    "n_kv_heads": 4,
    "d_model": 64,
    "tokenizer_hash": "beef",
    "template_hash": "f00d",
    "norm_hashes": ("n0", "n1", "n2", "other", "n4", "n5"),
}


def test_every_field_of_the_model_is_checked_or_free() -> None:
    assert tuple(MUTATED) == FINGERPRINT_FIELDS
    assert MUTATED.keys() | FREE.keys() == {field.name for field in fields(ModelInfo)}
    assert not MUTATED.keys() & FREE.keys()


@pytest.mark.parametrize("field", FINGERPRINT_FIELDS)
def test_a_differing_field_is_named(field: str) -> None:
    with pytest.raises(BankMismatch, match=f"{field} is ") as caught:
        banks.check(sample_bank(), replace(model_info(), **{field: MUTATED[field]}))
    assert caught.value.field == field
    assert "headrank calibrate --model Owner/Tiny-Model --bank BANK --data FILE" in str(caught.value)


@pytest.mark.parametrize("field", FREE)
def test_a_free_field_may_differ(field: str) -> None:
    banks.check(sample_bank(), replace(model_info(), **{field: FREE[field]}))


@pytest.mark.parametrize("start", range(len(FINGERPRINT_FIELDS)))
def test_the_first_of_several_differing_fields_is_named(start: int) -> None:
    differing = {field: MUTATED[field] for field in FINGERPRINT_FIELDS[start:]}
    with pytest.raises(BankMismatch) as caught:
        banks.check(sample_bank(), replace(model_info(), **differing))
    assert caught.value.field == FINGERPRINT_FIELDS[start]


def test_the_layer_of_a_differing_norm_is_named() -> None:
    with pytest.raises(
        BankMismatch, match=r"norm_hashes is 'other', the bank has 'n3'; layer 3 is the first"
    ):
        banks.check(sample_bank(), replace(model_info(), norm_hashes=MUTATED["norm_hashes"]))


@pytest.mark.parametrize("layers", range(LAYERS + 1))
def test_a_truncated_model_is_compared_by_the_layers_it_has(layers: int) -> None:
    cut = replace(model_info(), norm_hashes=model_info().norm_hashes[:layers])
    banks.check(sample_bank(), cut)
    if layers:
        wrong = replace(cut, norm_hashes=(*cut.norm_hashes[:-1], "other"))
        with pytest.raises(BankMismatch, match=f"layer {layers - 1} is the first to differ"):
            banks.check(sample_bank(), wrong)


@pytest.mark.parametrize(
    ("model_id", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b"),
        ("tiny", "tiny"),
        ("/models/My Model (v2)/", "my-model-v2"),
        ("C:\\models\\Phi_3", "phi_3"),
        ("owner/..", "model"),
        ("../../etc", "etc"),
        ("", "model"),
        (".hidden", "hidden"),
        ("模型", "model"),
        ("x" * 300, "x" * 100),
    ],
)
def test_slug(model_id: str, name: str) -> None:
    assert banks.slug(model_id) == name


def test_find_takes_a_folder_that_is_a_bank(tmp_path: Path) -> None:
    folder = banks.write(sample_bank(), tmp_path)
    assert banks.find(folder, model_info(model_id="any", config_hash="other")) == folder


def test_find_prefers_the_folder_named_after_the_model(tmp_path: Path) -> None:
    named = banks.write(sample_bank(info=model_info(config_hash="old")), tmp_path)
    banks.write(sample_bank(info=model_info(model_id="fits")), tmp_path)
    assert banks.find(tmp_path, model_info()) == named


def test_find_takes_the_only_bank_that_fits(tmp_path: Path) -> None:
    fits = banks.write(sample_bank(info=model_info(model_id="fits")), tmp_path)
    banks.write(sample_bank(info=model_info(model_id="misfit", config_hash="other")), tmp_path)
    damaged = banks.write(sample_bank(info=model_info(model_id="damaged")), tmp_path)
    (damaged / MANIFEST).write_text("{}")
    assert banks.find(tmp_path, model_info()) == fits


def test_find_refuses_to_choose_between_two(tmp_path: Path) -> None:
    for name in ("b", "a"):
        banks.write(sample_bank(info=model_info(model_id=name)), tmp_path)
    with pytest.raises(BankError, match=r"more than one head bank fits the model, name one of a, b$"):
        banks.find(tmp_path, model_info())


def test_find_tells_how_to_make_a_bank(tmp_path: Path) -> None:
    banks.write(sample_bank(info=model_info(model_id="misfit", config_hash="other")), tmp_path)
    command = f"headrank calibrate --model Owner/Tiny-Model --bank {tmp_path} --data FILE"
    with pytest.raises(BankError) as caught:
        banks.find(tmp_path, model_info())
    assert str(caught.value).endswith(
        f"(of other models, older or damaged: misfit); make one with: {command}"
    )
    with pytest.raises(BankError, match=r"no head bank for this model; make one with: headrank calibrate"):
        banks.find(tmp_path / "nowhere", model_info())


def test_locate(tmp_path: Path) -> None:
    with pytest.raises(BankError, match="no head bank here"):
        banks.locate(tmp_path)
    first = banks.write(sample_bank(), tmp_path)
    assert banks.locate(tmp_path) == first
    assert banks.locate(first) == first
    banks.write(sample_bank(info=model_info(model_id="other")), tmp_path)
    with pytest.raises(BankError, match=r"more than one head bank here, name one of other, tiny-model$"):
        banks.locate(tmp_path)


def test_shipped_banks_lie_inside_the_package() -> None:
    assert banks.shipped_root() == Path(banks.__file__).parent.parent / "banks"
