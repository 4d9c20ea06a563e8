"""From a folder to a runner, with no network and nothing but safetensors."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MambaConfig

from headbank.errors import InputError, ModelError, UnsupportedModel
from headbank.models import loading
from headbank.models.fake import FakeRunner
from headbank.models.hf import HFRunner
from headbank.models.loading import default_device, default_dtype, load_runner
from headbank.models.tap import ATTENTION_NAME
from tests.support.tiny_models import tiny_model, tiny_runner, tiny_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("models") / "Tiny-Llama"
    copy.deepcopy(tiny_model("llama")).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the saved model that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_a_folder_loads_and_reads_like_the_model_it_was_saved_from(saved: Path) -> None:
    runner = load_runner(str(saved), dtype="float32", device="cpu")
    assert isinstance(runner, HFRunner)
    original = tiny_runner("llama")
    assert runner.info.model_id == "Tiny-Llama"
    for field in ("config_hash", "tokenizer_hash", "template_hash", "norm_hashes", "windows", "dtype"):
        assert getattr(runner.info, field) == getattr(original.info, field), field
    layout = runner.prompts.build("Who wrote it?", ["Ada wrote it.", "Nobody <|im_end|> did."])
    assert layout == original.prompts.build("Who wrote it?", ["Ada wrote it.", "Nobody <|im_end|> did."])
    got, expected = runner.capture(layout), original.capture(layout)
    assert torch.equal(got.mass["query"], expected.mass["query"])
    assert runner._model.config._attn_implementation == ATTENTION_NAME
    assert not runner._model.training


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_named_precision_is_used_whatever_the_file_holds(saved: Path, dtype: str) -> None:
    runner = load_runner(str(saved), dtype=dtype, device="cpu")
    assert runner.info.dtype == dtype


def test_auto_takes_the_default_precision_of_the_device(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def double(device: str) -> torch.dtype:
        asked.append(device)
        return torch.float64

    monkeypatch.setattr(loading, "default_device", lambda: "cpu")
    monkeypatch.setattr(loading, "default_dtype", double)
    assert load_runner(str(saved)).info.dtype == "float64"
    assert asked == ["cpu"]


@pytest.mark.parametrize("dtype", ["double-precision", "Tensor", "float8", "", "int8", "complex64"])
def test_an_unknown_precision_is_an_input_error(saved: Path, dtype: str) -> None:
    with pytest.raises(InputError) as caught:
        load_runner(str(saved), dtype=dtype, device="cpu")
    assert caught.value.field == "dtype"


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_an_input_error(saved: Path, device: str) -> None:
    with pytest.raises(InputError) as caught:
        load_runner(str(saved), dtype="float32", device=device)
    assert caught.value.field == "device"


def test_an_empty_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_runner(str(tmp_path), device="cpu")


def test_pickled_weights_are_refused(folder: Path) -> None:
    """A `.bin` file can run code when it is opened."""
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model("llama").state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load_runner(str(folder), device="cpu")


def test_code_in_a_model_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (folder / "modeling_evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "evil"
    config["auto_map"] = {
        "AutoConfig": "modeling_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        load_runner(str(folder), device="cpu")
    assert not mark.exists()


@pytest.mark.parametrize("content", ["not json", '{"model_type": "no-such-type"}', '{"model_type": "bert"}'])
def test_a_configuration_of_something_else_is_an_error(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError):
        load_runner(str(folder), device="cpu")


def test_damaged_weights_are_a_model_error(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError):
        load_runner(str(folder), device="cpu")


def test_missing_weights_are_an_error_and_not_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_runner(str(folder), dtype="float32", device="cpu")


def test_a_folder_name_with_dots_is_kept_whole(folder: Path) -> None:
    """Banks are named after the model: `Qwen2.5-7B` and `Qwen2.5-0.5B` are not both `Qwen2`."""
    dotted = folder.rename(folder.with_name("Tiny2.5-0.1B"))
    assert load_runner(str(dotted), dtype="float32", device="cpu").info.model_id == "Tiny2.5-0.1B"


def test_a_missing_tokenizer_is_a_model_error(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError):
        load_runner(str(folder), device="cpu")


def test_a_model_without_attention_heads_is_unsupported(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="mamba"):
        load_runner(str(tmp_path), dtype="float32", device="cpu")


def test_the_fake_engine_needs_no_files() -> None:
    assert isinstance(load_runner("fake"), FakeRunner)


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_threads_are_bounded_only_when_asked(threads: int) -> None:
    load_runner("fake")
    assert torch.get_num_threads() == threads
    load_runner("fake", threads=threads + 1)
    assert torch.get_num_threads() == threads + 1


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({}, torch.float32),
        ({"avx512_bf16": False, "amx_bf16": False, "avx512": True}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ],
)
def test_a_processor_gets_bfloat16_only_with_instructions_for_it(
    capabilities: dict[str, bool], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert default_dtype("cpu") == expected


@pytest.mark.parametrize(("supported", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_gets_bfloat16_where_it_has_it(
    device: str, supported: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert default_dtype(device) == expected


@pytest.mark.parametrize(("available", "expected"), [(True, "cuda"), (False, "cpu")])
def test_the_default_device(available: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert default_device() == expected
