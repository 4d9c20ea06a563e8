"""A model of which only the first layers were loaded: what can be read is the same, bit for bit."""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaModel, ModernBertConfig, SmolLM3Config

from headbank import bank as banks
from headbank.errors import BankMismatch, InputError, ModelError
from headbank.models import loading
from headbank.models.base import CaptureRequest
from headbank.models.cache import DocumentCache
from headbank.models.hf import HFRunner
from headbank.models.loading import load_runner
from headbank.types import HeadId, Layout, PromptStyle, View
from tests.support.tiny_models import FAMILIES, from_config, tiny_model, tiny_tokenizer

DOCUMENTS = ["Ada wrote the first program.", "Nobody wrote it.", "The lamp is lit in the evening."]


def save(model: Any, folder: Path) -> Path:
    copy.deepcopy(model).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of 3 layers whose output layer is its own."""
    return save(tiny_model("llama"), tmp_path_factory.mktemp("models") / "Tiny-Llama")


def load(folder: Path, max_layers: int | None = None, **options: Any) -> HFRunner:
    runner = load_runner(str(folder), dtype="float32", device="cpu", max_layers=max_layers, **options)
    assert isinstance(runner, HFRunner)
    return runner


def heads_of(n_layers: int) -> tuple[HeadId, ...]:
    return tuple(HeadId(layer, head) for layer in range(n_layers) for head in range(4))


def request(
    runner: HFRunner,
    n_layers: int,
    views: tuple[View, ...] = ("query",),
    layout: Layout = "joint",
    documents: Sequence[str] = DOCUMENTS,
) -> CaptureRequest:
    prompt = runner.prompts.build("Who wrote it?", documents, style=PromptStyle(layout=layout))
    return CaptureRequest(prompt, heads_of(n_layers), views)


def masses(runner: HFRunner, n_layers: int, layout: Layout) -> torch.Tensor:
    return runner.capture(request(runner, n_layers, layout=layout)).mass["query"]


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_the_first_layers_read_as_in_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = save(tiny_model(family), tmp_path / family)
    whole = load(folder)
    total = whole.info.n_layers
    assert whole.loaded_layers == total == tiny_model(family).config.num_hidden_layers
    for n_layers in range(1, total):
        part = load(folder, n_layers)
        assert part.loaded_layers == n_layers
        assert part.info == replace(whole.info, norm_hashes=whole.info.norm_hashes[:n_layers])
        for layout in ("joint", "parallel"):
            assert torch.equal(masses(part, n_layers, layout), masses(whole, n_layers, layout))


def test_only_the_asked_layers_and_the_embedding_take_memory(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    read = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(("model.embed_tokens.", "model.norm.", "model.layers.0.", "model.layers.1."))
    }
    assert len(tensors) - len(read) == 9 + 1
    found = sum(weight.nbytes for weight in load(llama, 2)._model.parameters())
    assert found == sum(tensor.nbytes for tensor in read.values())


def test_tensors_that_are_left_out_are_not_looked_at(llama: Path, tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.startswith(("model.layers.1.", "model.layers.2.", "lm_head.")):
            tensors[name] = torch.zeros(0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError):
        load(folder)
    assert torch.equal(masses(load(folder, 1), 1, "joint"), masses(load(llama), 1, "joint"))


def test_missing_weights_of_a_loaded_layer_are_an_error(llama: Path, tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(folder, 2)
    assert load(folder, 1).loaded_layers == 1


def test_an_untested_family_is_checked_as_far_as_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = SmolLM3Config(
        **shape,
        num_key_value_heads=2,
        num_hidden_layers=4,
        no_rope_layers=[1, 0, 1, 1],
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=None,
    )
    folder = save(from_config(config), tmp_path)
    checked: list[int] = []
    honest = HFRunner._parity

    def noted(self: HFRunner) -> list[float]:
        differences = honest(self)
        checked.append(len(differences))
        return differences

    monkeypatch.setattr(HFRunner, "_parity", noted)
    part, whole = load(folder, 2), load(folder)
    assert checked == [2, 4]
    assert torch.equal(masses(part, 2, "joint"), masses(whole, 2, "joint"))


def test_a_bank_of_the_whole_model_fits(llama: Path, tmp_path: Path) -> None:
    whole, part = load(llama).info, load(llama, 2).info
    banks.check(SimpleNamespace(info=whole), part)  # type: ignore[arg-type]
    tuned = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        tuned.model.layers[1].input_layernorm.weight[0] += 0.1
    other = load(save(tuned, tmp_path / "Tiny-Llama"), 2).info
    with pytest.raises(BankMismatch, match="layer 1 is the first to differ"):
        banks.check(SimpleNamespace(info=whole), other)  # type: ignore[arg-type]


def test_what_needs_more_layers_is_refused(llama: Path) -> None:
    part = load(llama, 2)
    with pytest.raises(InputError, match=r"L2H0 cannot be read; only the first 2 of its 3 layers") as caught:
        part.capture(request(part, 3))
    assert (caught.value.field, caught.value.limit) == ("heads", 2)
    layout = request(part, 2).layout
    with pytest.raises(InputError, match="L2H0 cannot be read"):
        part.capture(CaptureRequest(layout))
    with pytest.raises(InputError, match="outside 3 x 4 heads"):
        part.capture(CaptureRequest(layout, (HeadId(3, 0),)))
    for views in (("response",), ("query", "response")):
        with pytest.raises(InputError, match="only the first 2 of its 3 layers were loaded") as caught:
            part.capture(request(part, 2, views))
        assert caught.value.field == "views"
    with pytest.raises(ModelError, match="only the first 2 of its 3 layers were loaded"):
        part.generate(layout.ids, 1)


def test_all_layers_are_the_whole_model(llama: Path) -> None:
    asked, whole = load(llama, 3), load(llama)
    assert asked.info == whole.info
    layout = request(whole, 3).layout
    assert asked.generate(layout.ids, 3) == whole.generate(layout.ids, 3)
    assert len(whole.generate(layout.ids, 3)) == 3


@pytest.mark.parametrize("max_layers", [0, -1, 4])
def test_a_number_of_layers_that_the_model_does_not_have_is_an_input_error(
    llama: Path, max_layers: int
) -> None:
    with pytest.raises(InputError) as caught:
        load(llama, max_layers)
    assert (caught.value.field, caught.value.limit) == ("max_layers", 3)


def test_the_first_layers_of_an_encoder_are_a_model_error(tmp_path: Path) -> None:
    config = ModernBertConfig(
        vocab_size=512,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        **{f"{name}_token_id": 2 for name in ("pad", "eos", "bos", "cls", "sep")},
    )
    save(AutoModel.from_config(config), tmp_path)
    with pytest.raises(ModelError, match="modernbert is no causal language model"):
        load(tmp_path, 1)


@pytest.fixture
def report() -> Iterator[list[str]]:
    """What transformers warns of while it loads."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_layers_left_out_on_purpose_are_not_reported_but_all_else_is(
    tmp_path: Path, report: list[str]
) -> None:
    before = LlamaModel._keys_to_ignore_on_load_unexpected
    folder = save(tiny_model("llama"), tmp_path)
    load(folder, 1)
    assert report == []
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.surplus.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load(folder, 1)
    assert len(report) == 1
    assert "mlp.surplus.weight" in report[0]
    assert "q_proj" not in report[0]
    assert "lm_head" not in report[0]
    assert LlamaModel._keys_to_ignore_on_load_unexpected == before


def test_documents_are_kept_within_the_given_bytes(llama: Path) -> None:
    kept = load(llama, 2, cache_bytes=1 << 20)
    for _ in range(2):
        assert torch.equal(masses(kept, 2, "parallel"), masses(load(llama), 2, "parallel"))
    assert kept.documents is not None
    counts = kept.documents.counts
    # The prefix and the documents, missed once and found once.
    assert (counts.misses, counts.hits, counts.documents) == (3, 3, 4)
    assert load(llama).documents is None


def test_both_bounds_reach_the_cache(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[tuple[int, int]] = []

    def made(device_bytes: int, host_bytes: int) -> DocumentCache:
        bounds.append((device_bytes, host_bytes))
        return DocumentCache(device_bytes, host_bytes)

    monkeypatch.setattr(loading, "DocumentCache", made)
    load(llama, cache_bytes=1000, host_cache_bytes=2000)
    load(llama, host_cache_bytes=2000)
    assert bounds == [(1000, 2000)]


@pytest.mark.parametrize("name", ["cache_bytes", "host_cache_bytes"])
def test_negative_bytes_are_an_input_error(llama: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        load(llama, **{name: -1})
    assert (caught.value.field, caught.value.limit) == (name, 0)
