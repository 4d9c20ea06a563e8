"""Models of families without a parity test: checked when they are loaded, refused when they cannot be read."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Cohere2Config,
    CohereConfig,
    DiffLlamaConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    JambaConfig,
    MambaConfig,
    StableLmConfig,
)

from headbank.errors import UnsupportedModel
from headbank.models import tap
from headbank.models.base import CaptureRequest
from headbank.models.hf import HFRunner
from headbank.types import PromptStyle
from tests.support.reference import STYLES, eager_prompt
from tests.support.tiny_models import from_config, tiny_model, tiny_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 2,
}

OTHERS: dict[str, Any] = {
    # Its scale is a setting (1 / head width elsewhere).
    "granite": GraniteConfig(**SHAPE, attention_multiplier=0.5, residual_multiplier=0.7),
    # Interleaved rotary positions; attention and MLP side by side.
    "cohere": CohereConfig(**SHAPE, use_qk_norm=True),
    "cohere2": Cohere2Config(
        **SHAPE,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    # Rotary positions on a part of each head; LayerNorm with bias.
    "stablelm": StableLmConfig(**SHAPE, use_qkv_bias=True),
}


@pytest.mark.parametrize("style", STYLES[:2], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_an_untested_family_is_checked_and_read(name: str, style: PromptStyle) -> None:
    model = from_config(OTHERS[name], torch.float64)
    runner = HFRunner(model, tiny_tokenizer(), model_id=name)
    assert model.config._attn_implementation == tap.ATTENTION_NAME
    documents = ["Ada wrote the book, and the lamp was lit.", "Nobody did."]
    layout = runner.prompts.build("Who wrote it?", documents, style=style)
    rows, _ = eager_prompt(model, layout)
    query = slice(layout.query.start, layout.query.end)
    expected = torch.cat([layer[:, query].mean(1) for layer in rows])
    capture = runner.capture(CaptureRequest(layout))
    torch.testing.assert_close(capture.mass["query"], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_check_passes_in_every_precision_and_notices_a_wrong_scale(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = from_config(OTHERS["granite"]).to(dtype)
    HFRunner(model, tiny_tokenizer(), model_id="granite")
    honest = tap.attention_rows

    def usual_scale(query: Tensor, *rest: Any, **options: Any) -> Tensor:
        return honest(query, *rest, **{**options, "scaling": query.shape[-1] ** -0.5})

    monkeypatch.setattr(tap, "attention_rows", usual_scale)
    with pytest.raises(
        UnsupportedModel, match=r"granite: tapped rows differ from eager attention by 0\.\d+ in layer 0"
    ):
        HFRunner(model, tiny_tokenizer(), model_id="granite")


def test_a_tested_family_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: HFRunner) -> None:
        raise AssertionError("checked")

    monkeypatch.setattr(HFRunner, "_check_parity", fail)
    HFRunner(tiny_model("llama"), tiny_tokenizer(), model_id="llama")


def test_rows_that_are_not_numbers_fail_the_check() -> None:
    model = from_config(OTHERS["granite"])
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(UnsupportedModel, match="differ from eager attention by nan in layer 1"):
        HFRunner(model, tiny_tokenizer(), model_id="broken")


UNREADABLE: dict[str, tuple[Any, str]] = {
    "gpt_oss": (
        GptOssConfig(**SHAPE, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
        "attention sinks",
    ),
    "mamba": (
        MambaConfig(
            vocab_size=512,
            hidden_size=32,
            num_hidden_layers=2,
            bos_token_id=None,
            pad_token_id=None,
            eos_token_id=2,
        ),
        "mamba: no list of decoder layers with attention heads",
    ),
    "gpt2": (
        GPT2Config(vocab_size=512, n_embd=32, n_head=4, n_layer=2, bos_token_id=None, eos_token_id=2),
        "gpt2: no list of decoder layers with attention heads",
    ),
    "jamba": (
        JambaConfig(
            **SHAPE,
            num_experts=1,
            num_experts_per_tok=1,
            use_mamba_kernels=False,
            attn_layer_period=2,
            attn_layer_offset=1,
        ),
        "jamba: attention cannot be read",
    ),
    "diffllama": (DiffLlamaConfig(**SHAPE), "diffllama: attention cannot be read"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_model_that_cannot_be_tapped_is_refused(name: str) -> None:
    config, message = UNREADABLE[name]
    model = from_config(config)
    with pytest.raises(UnsupportedModel, match=message):
        HFRunner(model, tiny_tokenizer(), model_id=name)
