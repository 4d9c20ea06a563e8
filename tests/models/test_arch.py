"""A model's identity: what must change a hash does, what a file format changes does not."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headbank.errors import UnsupportedModel
from headbank.models.arch import (
    TESTED_FAMILIES,
    context_tokens,
    decoder_layers,
    describe,
    first_layers,
    layer_windows,
    norm_hashes,
    tokenizer_hash,
)
from headbank.types import ModelInfo
from tests.support.tiny_models import FAMILIES, WINDOW, from_config, tiny_config, tiny_model, tiny_tokenizer


def info(model: Any) -> ModelInfo:
    return describe(model, model.config, tiny_tokenizer(), model_id="m", revision="r", template_hash="t")


def config_hash(family: str, **changes: Any) -> str:
    return info(from_config(tiny_config(family, **changes))).config_hash


def single(value: float) -> float:
    """The number as a GGUF header gives it back."""
    rounded = float(np.float32(value))
    assert rounded != value
    return rounded


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def test_every_tested_family_has_a_tiny_model() -> None:
    assert set(FAMILIES) == TESTED_FAMILIES
    for family in FAMILIES:
        assert tiny_config(family).model_type == family


def test_the_shape_of_a_model() -> None:
    found = info(tiny_model("gemma2"))
    assert (found.model_id, found.revision, found.template_hash) == ("m", "r", "t")
    assert (found.n_layers, found.n_heads, found.n_kv_heads) == (4, 4, 2)
    # The head width is a setting of its own: 32 / 4 would be 8.
    assert (found.d_model, found.d_head) == (32, 16)
    assert found.context_tokens == 1024
    assert found.windows == (WINDOW, None, WINDOW, None)
    assert found.dtype == "float32"
    assert len(found.norm_hashes) == 4
    assert info(tiny_model("olmo2")).d_head == 8


WINDOWS: dict[str, tuple[int | None, ...]] = {
    "llama": (None,) * 3,
    "mistral": (WINDOW,) * 3,
    "qwen2": (None, None, WINDOW),
    "qwen3": (None,) * 3,
    "gemma2": (WINDOW, None) * 2,
    "gemma3_text": (WINDOW, None) * 2,
    "olmo2": (None,) * 3,
    "phi3": (None,) * 3,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_of_the_layers(family: str) -> None:
    assert layer_windows(tiny_config(family)) == WINDOWS[family]


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        # Qwen names a window that is switched off.
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4096}, (None,) * 3),
        ("mistral", {"sliding_window": None}, (None,) * 3),
        ("phi3", {"sliding_window": 20}, (20,) * 3),
        ("gemma3_text", {"sliding_window_pattern": 4}, (WINDOW, WINDOW, WINDOW, None)),
        ("gemma2", {"layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
def test_windows_of_other_settings(
    family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert layer_windows(tiny_config(family, **changes)) == windows


def test_a_window_that_is_switched_off_is_none() -> None:
    """Some families keep the number beside the switch, and name no kind per layer."""
    config = SimpleNamespace(num_hidden_layers=2, sliding_window=4096, use_sliding_window=False)
    assert layer_windows(config) == (None, None)
    config.use_sliding_window = True
    assert layer_windows(config) == (4096, 4096)


def test_the_first_layers_of_a_model_describe_the_whole_of_it() -> None:
    whole = tiny_model("gemma2")
    part = copy.deepcopy(whole)
    part.model.layers = part.model.layers[:1]
    found = describe(part, whole.config, tiny_tokenizer(), model_id="m", revision="r", template_hash="t")
    expected = info(whole)
    assert found == replace(expected, norm_hashes=expected.norm_hashes[:1])


@pytest.mark.parametrize(
    ("family", "n_layers", "expected"),
    [
        ("llama", 2, {"num_hidden_layers": 2}),
        ("mistral", 1, {"num_hidden_layers": 1}),
        ("qwen2", 2, {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}),
        ("qwen3", 1, {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
        (
            "gemma2",
            3,
            {
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        ("gemma3_text", 1, {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
        ("olmo2", 2, {"num_hidden_layers": 2}),
        ("phi3", 2, {"num_hidden_layers": 2}),
    ],
)
def test_fields_of_the_first_layers(family: str, n_layers: int, expected: dict[str, Any]) -> None:
    config = tiny_config(family)
    before = config.to_dict()
    assert first_layers(config, n_layers) == expected
    assert config.to_dict() == before


def test_a_list_is_cut_only_when_it_is_about_layers() -> None:
    config = SimpleNamespace(
        num_hidden_layers=3,
        no_rope_layers=[1, 1, 0],
        mlp_layer_types=("dense", "dense", "sparse"),
        dense_layers=[0, 2],
        layer_norm_eps=1e-5,
        eos_token_id=[7, 8, 9],
    )
    assert first_layers(config, 2) == {
        "num_hidden_layers": 2,
        "no_rope_layers": [1, 1],
        "mlp_layer_types": ("dense", "dense"),
    }


FORWARD_CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"hidden_size": 64}),
    ("llama", {"intermediate_size": 64}),
    ("llama", {"num_hidden_layers": 2}),
    ("llama", {"num_attention_heads": 8}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"head_dim": 16}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"rms_norm_eps": 1e-5}),
    ("llama", {"attention_bias": True}),
    ("llama", rope(5e5)),
    ("llama", rope(10000.0, rope_type="linear", factor=2.0)),
    ("qwen2", {"max_window_layers": 1}),
    ("qwen2", {"sliding_window": 13}),
    ("qwen2", {"use_sliding_window": False}),
    ("mistral", {"sliding_window": None}),
    ("gemma2", {"query_pre_attn_scalar": 12}),
    ("gemma2", {"attn_logit_softcapping": 5.0}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"hidden_activation": "gelu"}),
    ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
]


@pytest.mark.parametrize(("family", "changes"), FORWARD_CHANGES)
def test_the_config_hash_changes_with_what_shapes_the_forward_pass(
    family: str, changes: dict[str, Any]
) -> None:
    assert config_hash(family, **changes) != config_hash(family)


def test_the_config_hash_names_the_family() -> None:
    hashes = {config_hash("llama"), config_hash("mistral", sliding_window=None), config_hash("qwen3")}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("family", "base", "stored"),
    [
        ("llama", {"rms_norm_eps": 1e-5}, {"rms_norm_eps": single(1e-5)}),
        ("llama", {"rms_norm_eps": 1e-6}, {"rms_norm_eps": single(1e-6)}),
        ("llama", rope(1234567.1), rope(single(1234567.1))),
        ("llama", rope(500000), rope(500000.0)),
        ("llama", {}, {"vocab_size": 640}),
        ("gemma2", {"attn_logit_softcapping": 4.1}, {"attn_logit_softcapping": single(4.1)}),
        ("gemma2", {"query_pre_attn_scalar": 11}, {"query_pre_attn_scalar": 11}),
        # What tokens are called and what the model may write do not shape the pass.
        ("llama", {}, {"eos_token_id": 5, "initializer_range": 0.5, "tie_word_embeddings": True}),
        # A head width that is only implied, and one that is written out.
        ("llama", {"head_dim": 8}, {"head_dim": None}),
    ],
)
def test_the_config_hash_survives_other_file_formats(
    family: str, base: dict[str, Any], stored: dict[str, Any]
) -> None:
    assert config_hash(family, **base) == config_hash(family, **stored)


@pytest.mark.parametrize("family", FAMILIES)
def test_norm_hashes_survive_a_copy_in_bfloat16(family: str) -> None:
    model = tiny_model(family)
    hashes = norm_hashes(model.model.layers)
    assert len(set(hashes)) == len(hashes) == model.config.num_hidden_layers
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert norm_hashes(half.model.layers) == hashes
    assert norm_hashes(tiny_model(family, torch.float64).model.layers) == hashes


@pytest.mark.parametrize(
    ("family", "norm"),
    [
        ("llama", "input_layernorm"),
        ("llama", "post_attention_layernorm"),
        ("qwen3", "self_attn.q_norm"),
        ("gemma2", "pre_feedforward_layernorm"),
        ("gemma3_text", "self_attn.k_norm"),
        ("olmo2", "post_feedforward_layernorm"),
    ],
)
def test_one_norm_weight_tells_a_fine_tune_from_its_base(family: str, norm: str) -> None:
    model = copy.deepcopy(tiny_model(family))
    before = norm_hashes(model.model.layers)
    weight = model.model.layers[1].get_submodule(norm).weight
    with torch.no_grad():
        weight[3] += 0.1
    after = norm_hashes(model.model.layers)
    assert [a == b for a, b in zip(before, after, strict=True)] == [i != 1 for i in range(len(before))]


def test_norm_hashes_leave_quantised_weights_out() -> None:
    model = copy.deepcopy(tiny_model("qwen2"))
    before = norm_hashes(model.model.layers)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
        model.model.layers[0].self_attn.q_proj.bias[0] += 1
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert norm_hashes(model.model.layers) == before


def test_the_tokenizer_hash_tells_tokenizers_apart() -> None:
    hashes = [
        tokenizer_hash(tokenizer)
        for tokenizer in (
            tiny_tokenizer(),
            tiny_tokenizer(extra_words=("fox",)),
            tiny_tokenizer(extra_tokens=("日本",)),
            tiny_tokenizer(bos="<|endoftext|>"),
        )
    ]
    assert len(set(hashes)) == 4
    assert hashes[0] == tokenizer_hash(copy.deepcopy(tiny_tokenizer()))


def test_the_tokenizer_hash_sees_whether_special_tokens_are_special() -> None:
    plain = copy.deepcopy(tiny_tokenizer())
    plain.add_special_tokens({"additional_special_tokens": ["</s>"]})
    assert tokenizer_hash(plain) != tokenizer_hash(tiny_tokenizer())


def test_the_tokenizer_hash_leaves_the_template_and_padding_out() -> None:
    other = copy.deepcopy(tiny_tokenizer(chat_template=None))
    other.add_tokens(["a token past the end of every text"])
    assert tokenizer_hash(other) == tokenizer_hash(tiny_tokenizer())


@pytest.mark.parametrize(
    ("kind", "expected"), [("longrope", 4096), ("dynamic", 4096), ("default", 131072), ("llama3", 131072)]
)
def test_ropes_that_change_with_length_hold_a_model_to_its_original_context(kind: str, expected: int) -> None:
    config = SimpleNamespace(
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "original_max_position_embeddings": 4096},
    )
    assert context_tokens(config) == expected


def test_the_original_context_may_stand_in_the_configuration_itself() -> None:
    config = SimpleNamespace(
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={"rope_type": "longrope"},
    )
    assert context_tokens(config) == 4096


def test_a_model_without_decoder_layers_is_refused() -> None:
    assert len(decoder_layers(tiny_model("llama"))) == 3
    model = copy.deepcopy(tiny_model("llama"))
    del model.model.layers
    with pytest.raises(UnsupportedModel, match="llama"):
        decoder_layers(model)
