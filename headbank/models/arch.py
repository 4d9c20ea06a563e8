"""What identifies a model: its shape, its windows, and hashes that survive quantisation and file formats."""

import hashlib
import json
from typing import Any

import torch

from headbank.errors import UnsupportedModel
from headbank.types import ModelInfo

TESTED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "phi3"})
"""`model_type`s with an eager parity test; a model of another family is checked once when it is loaded."""

_FORWARD_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "rope_parameters",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_bias",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "clip_qkv",
)

_TOKENIZER_PROBE = (
    "The quick brown fox, 3.14159 and 2026-01-31!\n\n\tdef f(x): return x**2  # café nai\u0308ve A\u030angström\r\n"
    "日本語の文章と中文句子。한국어 문장. Привет, мир. مرحبا 🙂👩‍👩‍👧 "
    "<|im_end|> </s> <end_of_turn> <unk> 'tis don't WE'LL"
)


def _canonical(value: Any) -> Any:
    """Numbers as rounded floats (a GGUF header stores float32), dictionaries without empty entries."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return f"{float(value):.6g}"
    if isinstance(value, dict):
        return {k: _canonical(v) for k, v in sorted(value.items()) if v is not None}
    return [_canonical(v) for v in value]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Sliding window of each layer in tokens, None where the layer sees the whole context. [L]"""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if window is None or kinds is None:
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def context_tokens(config: Any) -> int:
    """Longest prompt that one computation and several in steps agree on.

    Rotary embeddings of the kinds `longrope` and `dynamic` change for all positions once a prompt passes the length
    the model was first trained on, so keys computed before that point would not fit; such models are held to it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    longest = int(config.max_position_embeddings)
    if rope.get("rope_type") in ("longrope", "dynamic"):
        original = rope.get("original_max_position_embeddings")
        if original is None:
            original = getattr(config, "original_max_position_embeddings", longest)
        longest = min(longest, int(original or longest))
    return longest


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of how the tokenizer encodes a fixed text in many scripts, with special tokens split and whole."""
    ids = [
        tokenizer(_TOKENIZER_PROBE, add_special_tokens=False, split_special_tokens=split)["input_ids"]
        for split in (True, False)
    ]
    return _digest([ids, tokenizer.bos_token_id])


def norm_hashes(layers: torch.nn.ModuleList) -> tuple[str, ...]:
    """Per given layer, a hash of its norm weights rounded to bfloat16. [L]

    Quantised files keep norms in full precision and fine-tuning moves them, so this tells a fine-tune from its base
    while a quantised copy of the same model still fits its bank.
    """
    hashes = []
    for layer in layers:
        digest = hashlib.sha256()
        for name, weight in sorted(layer.named_parameters()):
            if weight.dim() == 1 and "norm" in name:
                digest.update(weight.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
        hashes.append(digest.hexdigest()[:16])
    return tuple(hashes)


def decoder_layers(model: Any) -> torch.nn.ModuleList:
    """The decoder layers of a causal language model. Raises UnsupportedModel when no list of them is found."""
    config = model.config.get_text_config()
    layers: torch.nn.ModuleList | None = getattr(model.base_model, "layers", None)
    needed = ("num_attention_heads", "max_position_embeddings")
    if layers is None or not all(hasattr(config, name) for name in needed):
        raise UnsupportedModel(
            f"{config.model_type}: no list of decoder layers with attention heads was found"
        )
    return layers


def first_layers(config: Any, n_layers: int) -> dict[str, Any]:
    """Fields of a text configuration, by name, that differ when only its first `n_layers` layers are built.

    They are the number of layers and every list with one entry per layer (`layer_types`); a list counts as one by its
    length and the word `layer` in its name.
    """
    total = config.num_hidden_layers
    lists = {
        name: value[:n_layers]
        for name, value in vars(config).items()
        if "layer" in name and isinstance(value, list | tuple) and len(value) == total
    }
    return {"num_hidden_layers": n_layers, **lists}


def describe(
    model: Any, config: Any, tokenizer: Any, *, model_id: str, revision: str, template_hash: str
) -> ModelInfo:
    """Identity and shape of a loaded model.

    `config` is the text configuration of the whole model; `model` may hold only its first layers, which then are
    those that `norm_hashes` covers. Raises UnsupportedModel when it has no softmax attention layers.
    """
    layers = decoder_layers(model)
    n_heads = int(config.num_attention_heads)
    d_head = int(getattr(config, "head_dim", None) or config.hidden_size // n_heads)
    # Absent fields are left out, so that a field added here changes the hash of no model that lacks it.
    fields = {
        name: _canonical(value)
        for name in _FORWARD_FIELDS
        if (value := getattr(config, name, None)) is not None
    }
    fields["head_dim"] = _canonical(d_head)
    fields["windows"] = _canonical(list(layer_windows(config)))
    return ModelInfo(
        model_id=model_id,
        revision=revision,
        config_hash=_digest(fields),
        n_layers=int(config.num_hidden_layers),
        n_heads=n_heads,
        n_kv_heads=int(getattr(config, "num_key_value_heads", None) or n_heads),
        d_model=int(config.hidden_size),
        d_head=d_head,
        context_tokens=context_tokens(config),
        windows=layer_windows(config),
        tokenizer_hash=tokenizer_hash(tokenizer),
        template_hash=template_hash,
        norm_hashes=norm_hashes(layers),
        dtype=str(model.dtype).removeprefix("torch."),
    )
