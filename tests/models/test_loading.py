"""From a folder to a runner, with no network and nothing but safetensors."""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, MambaConfig

from headbank.errors import InputError, ModelError, UnsupportedModel
from headbank.models import loading
from headbank.models.base import CaptureRequest
from headbank.models.fake import FakeRunner
from headbank.models.hf import HFRunner
from headbank.models.loading import default_device, load_runner, probe_dtype, usable_cpus
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
    got, expected = runner.capture(CaptureRequest(layout)), original.capture(CaptureRequest(layout))
    assert torch.equal(got.mass["query"], expected.mass["query"])
    assert runner._model.config._attn_implementation == ATTENTION_NAME
    assert not runner._model.training


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_named_precision_is_used_whatever_the_file_holds(saved: Path, dtype: str) -> None:
    runner = load_runner(str(saved), dtype=dtype, device="cpu")
    assert runner.info.dtype == dtype


def test_auto_asks_for_the_precision_with_the_widths_of_the_model(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, str]] = []

    def double(d_model: int, d_ff: int, device: str) -> torch.dtype:
        asked.append((d_model, d_ff, device))
        return torch.float64

    monkeypatch.setattr(loading, "default_device", lambda: "cpu")
    monkeypatch.setattr(loading, "probe_dtype", double)
    assert load_runner(str(saved)).info.dtype == "float64"
    assert asked == [(32, 48, "cpu")]
    load_runner(str(saved), dtype="float32")
    assert len(asked) == 1


def test_auto_finds_a_precision_where_the_inner_width_is_not_named(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=512, n_embd=32, n_head=4, n_layer=1, bos_token_id=None, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="gpt2"):
        load_runner(str(tmp_path), device="cpu")


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


SMALL_BERT = {"model_type": "bert", "vocab_size": 512, "hidden_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "content",
    ["not json", '{"model_type": "no-such-type"}', json.dumps(SMALL_BERT | {"num_hidden_layers": 1})],
)
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
def threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process with 6 threads of torch that may use 4 processors; the folder stands for its control group."""
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 5, 7}, raising=False)
    monkeypatch.setattr(loading, "_CGROUP", tmp_path)
    yield tmp_path
    torch.set_num_threads(before)


@pytest.mark.parametrize(("before", "asked", "after"), [(6, None, 4), (3, None, 3), (6, 5, 5), (3, 1, 1)])
@pytest.mark.usefixtures("threads")
def test_threads_are_those_asked_for_or_no_more_than_the_processors(
    before: int, asked: int | None, after: int
) -> None:
    torch.set_num_threads(before)
    load_runner("fake", threads=asked)
    assert torch.get_num_threads() == after


def test_no_threads_are_an_input_error() -> None:
    with pytest.raises(InputError) as caught:
        load_runner("fake", threads=0)
    assert (caught.value.field, caught.value.limit) == ("threads", 1)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "900000 100000\n"}, 4),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "300000\n"}, 4),
    ],
)
def test_the_quota_of_a_container_bounds_the_processors(
    threads: Path, files: dict[str, str], expected: int
) -> None:
    (threads / "cpu").mkdir()
    for name, content in files.items():
        (threads / name).write_text(content)
    assert usable_cpus() == expected


def clock(seconds: Sequence[float]) -> Callable[[], float]:
    """A timer by which the first run takes the first number of seconds, and so on."""
    readings: list[float] = []
    for taken in seconds:
        begin = readings[-1] + 100 if readings else 0.0
        readings += [begin, begin + taken]
    return iter(readings).__next__


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # float32 and bfloat16 in turn; the fastest of three runs counts.
        ([60, 50, 60, 50, 60, 50], torch.bfloat16),
        ([59, 50, 59, 50, 59, 50], torch.float32),
        ([50, 50, 50, 50, 50, 50], torch.float32),
        ([60, 300, 60, 300, 60, 300], torch.float32),
        ([90, 80, 60, 90, 80, 50], torch.bfloat16),
        ([60, 50, 60, 50, 59, 50], torch.float32),
        ([60, 90, 60, 51, 60, 90], torch.float32),
    ],
)
def test_a_processor_gets_bfloat16_only_where_it_is_faster(
    seconds: list[float], expected: torch.dtype
) -> None:
    assert probe_dtype(32, 48, "cpu", clock(seconds)) == expected


@pytest.mark.parametrize(("widths", "expected"), [((32, 48), (32, 48)), ((4096, 14336), (256, 256))])
def test_the_probe_times_a_layer_of_the_model_or_a_part_of_a_large_one(
    widths: tuple[int, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]] = []

    def linear(rows: torch.Tensor, weight: torch.Tensor) -> None:
        seen.append((rows.dtype, tuple(rows.shape), tuple(weight.shape)))

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    probe_dtype(*widths, "cpu")
    d_model, d_ff = expected
    assert seen == [(dtype, (256, d_model), (d_ff, d_model)) for dtype in (torch.float32, torch.bfloat16)] * 3


@pytest.mark.parametrize(("supported", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_gets_bfloat16_where_it_has_it(
    device: str, supported: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert probe_dtype(32, 48, device, clock([])) == expected


def test_another_device_gets_float32_unprobed() -> None:
    assert probe_dtype(32, 48, "mps", clock([])) == torch.float32


@pytest.mark.parametrize(("available", "expected"), [(True, "cuda"), (False, "cpu")])
def test_the_default_device(available: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert default_device() == expected
