"""Tiny random models and a tiny tokenizer, made in memory: every family the tap supports, no files."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from headbank.models.hf import HFRunner
from headbank.models.tap import ATTENTION_NAME

WINDOW = 12
"""Sliding window of the tiny Mistral, Gemma 2 and Gemma 3; every test prompt is longer."""

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TRAINING_LINES = (
    "Answer the question with the help of these documents.",
    "Document 1:\nDocument 2:\nDocument 3:\n\nQuestion:\n",
    "Answer the question in a few words. Write the answer only.",
    "user\nassistant\nsystem\nWhich of these is about the answer to the question, and where was it written?",
)

_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "pad_token_id": None,
}
_HEADS_OF_8: dict[str, Any] = {"head_dim": 8}
_QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}

_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"num_hidden_layers": 3, **_HEADS_OF_8}),
    "mistral": (MistralConfig, {"num_hidden_layers": 3, "sliding_window": WINDOW, **_HEADS_OF_8}),
    "qwen2": (Qwen2Config, {"num_hidden_layers": 3, **_QWEN2_WINDOW}),
    "qwen3": (Qwen3Config, {"num_hidden_layers": 3, **_HEADS_OF_8}),
    "gemma2": (
        Gemma2Config,
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "head_dim": 16,
            # Not the head width, so that a wrong scale shows; a cap low enough to bend the scores.
            "query_pre_attn_scalar": 11,
            "attn_logit_softcapping": 4.0,
        },
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 11,
        },
    ),
    "olmo2": (Olmo2Config, {"num_hidden_layers": 3}),
    "phi3": (Phi3Config, {"num_hidden_layers": 3}),
}

FAMILIES = tuple(_CONFIGS)


def tiny_config(family: str, **changes: Any) -> Any:
    """Configuration of a tiny model of a family."""
    kind, fields = _CONFIGS[family]
    return kind(**{**_SHAPE, "eos_token_id": tiny_tokenizer().eos_token_id, **fields, **changes})


@lru_cache
def tiny_tokenizer(
    *,
    extra_words: tuple[str, ...] = (),
    extra_tokens: tuple[str, ...] = (),
    chat_template: str | None = CHAT_TEMPLATE,
    nfc: bool = False,
    bos: str | None = None,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of under 512 tokens with ChatML special tokens; any text decodes to itself.

    `extra_words` become one token each where they stand alone, `extra_tokens` anywhere; `nfc` composes accents
    first, as Qwen's tokenizer does.
    """
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.NFC() if nfc else None
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        _TRAINING_LINES,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    raw.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in extra_words])
    raw.add_tokens([AddedToken(token, normalized=False) for token in extra_tokens])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token=bos,
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def sharpen(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every weight from a seed so that each layer's attention rows are far from uniform.

    Scores get a standard deviation of about 3; norms vary by channel and biases are not zero.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1 and name.endswith("bias"):
                weight.copy_(noise * 0.5)
            elif weight.dim() == 1:
                # Gemma multiplies by 1 + weight: 0.7 is a gain of 1.7 there and 0.7 elsewhere.
                gain = 1.7 if "q_norm" in name or "k_norm" in name else 1.0
                plus_one = 1.0 if "Gemma" in type(model).__name__ else 0.0
                weight.copy_(gain * (1 + 0.2 * noise) - plus_one)
            elif "embed" in name or "lm_head" in name:
                weight.copy_(noise)
            else:
                gain = 1.7 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 0.7
                weight.copy_(noise * gain / math.sqrt(weight.shape[-1]))


def from_config(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A sharpened model of any configuration, tapped, in eval mode."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    sharpen(model, seed)
    return model.to(dtype).eval()


@lru_cache
def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """The tiny model of a family; shared between tests, so do not change it."""
    return from_config(tiny_config(family), dtype)


@lru_cache
def tiny_runner(family: str = "llama", dtype: torch.dtype = torch.float32) -> HFRunner:
    """A runner over `tiny_model`; shared between tests."""
    return HFRunner(tiny_model(family, dtype), tiny_tokenizer(), model_id=f"tiny-{family}")


@contextmanager
def eager(model: Any) -> Iterator[Any]:
    """The model with transformers' own eager attention, whose softmax keeps float64 for float64 scores.

    Eager attention asks for `softmax(dtype=float32)`, which would round a float64 reference to 1e-7.
    """
    softmax = torch.nn.functional.softmax

    def wide(
        scores: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, **rest: Any
    ) -> torch.Tensor:
        return softmax(scores, dim=dim, dtype=None if scores.dtype == torch.float64 else dtype, **rest)

    name = model.config._attn_implementation
    model.set_attn_implementation("eager")
    torch.nn.functional.softmax = wide
    try:
        yield model
    finally:
        torch.nn.functional.softmax = softmax
        model.set_attn_implementation(name)


@torch.no_grad()
def eager_rows(model: Any, ids: torch.Tensor, **inputs: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Reference: every attention row of every layer [B, H, T, T], and the logits [B, T, V]."""
    with eager(model):
        out = model(input_ids=ids, use_cache=False, output_attentions=True, **inputs)
    return list(out.attentions), out.logits


def random_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Token ids that are no special tokens, int64."""
    return torch.randint(3, 400, shape, generator=torch.Generator().manual_seed(seed))


class Work:
    """Counts the calls of a model's modules, and the tokens of every pass, inside a `with` block."""

    def __init__(self, model: Any) -> None:
        self.calls: Counter[str] = Counter()
        self.tokens: list[int] = []
        """Tokens that enter each pass."""
        self._model = model
        self._handles: list[Any] = []

    def _hook(self, name: str) -> Any:
        def count(module: Any, inputs: Any) -> None:
            self.calls[name] += 1
            if name == "model.embed_tokens":
                self.tokens.append(inputs[0].shape[1])

        return count

    def __enter__(self) -> "Work":
        named = [(name, module) for name, module in self._model.named_modules() if name]
        self._handles = [module.register_forward_pre_hook(self._hook(name)) for name, module in named]
        return self

    def __exit__(self, *reason: object) -> None:
        for handle in self._handles:
            handle.remove()
