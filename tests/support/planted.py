"""A tiny Llama whose attention is known: its weights are set by hand, so what calibration must find is known too.

    layer 0, head 0   `copier`   looks at every content word alike and writes what it saw: the answer
    layer 1, head 2   `planted`  looks from a word at the same word elsewhere, wherever it stands
    layer 2, head 1   `biased`   looks at what is far away, whatever it says: the first document beats the others
    all others        uniform    look at everything alike

The model answers a question with the content word that its prompt holds most often, then stops; the answer's word
is in the golds, so both views have something to find.
"""

import math
import random
from functools import lru_cache
from itertools import cycle, islice

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headbank.models.hf import HFRunner
from headbank.models.tap import ATTENTION_NAME
from headbank.types import Document, HeadId, Sample
from tests.support.tiny_models import tiny_tokenizer

COPIER, PLANTED, BIASED = HeadId(0, 0), HeadId(1, 2), HeadId(2, 1)

_LIST = (
    "amber basalt cedar dahlia ember falcon garnet heron indigo jasmine kestrel lilac marble nettle obsidian pewter "
    "quartz raven saffron topaz umber violet walnut yarrow zinc acorn badger copper dune elm fjord glacier harbor "
    "iris juniper kelp lagoon maple nutmeg otter pebble quail reed spruce thistle urchin vine willow aspen birch "
    "coral delta egret fern gravel hazel ivory jade"
)
WORDS = tuple(_LIST.split())
"""Content words, one token and one direction each; no other token has content."""

_FILLERS = ("the", "and", "of", "near", "some", "old")
"""Words of one token each without content."""

N_LAYERS, N_HEADS, N_KV_HEADS, D_HEAD = 3, 4, 2, 128
_THETA = 1e12
_CALM = 64
"""Width of the part of a head that rotary positions leave alone: they turn it by under 1e-3 over the whole context."""
_SLOW = 14
"""A rotary pair that turns by 2.4 radians over 1024 tokens: its cosine falls over the whole context."""

# Residual stream: one direction per word, "is a content word", the answer being written, and a constant that is so
# large that RMSNorm changes the rest by about 1 %.
_FLAG, _ANSWER, _CONSTANT = _CALM, _CALM + 1, 2 * _CALM + 1
_D_MODEL = 2 * _CALM + 4
_LARGE = 20.0


@lru_cache
def planted_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with one token per word."""
    return tiny_tokenizer(extra_words=WORDS + _FILLERS)


def _calm_dims() -> torch.Tensor:
    """Dimensions of a head that are hardly rotated: the slow half of the pairs (i, i + D_HEAD / 2). [_CALM]"""
    slow = torch.arange(_CALM // 2, _CALM)
    return torch.cat([slow, slow + D_HEAD // 2])


def _rows(head: int, dims: torch.Tensor | int) -> torch.Tensor:
    """Rows of a projection matrix that make up dimensions of one head."""
    return head * D_HEAD + torch.as_tensor(dims)


def _config() -> LlamaConfig:
    tokenizer = planted_tokenizer()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_D_MODEL,
        intermediate_size=8,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV_HEADS,
        head_dim=D_HEAD,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        tie_word_embeddings=False,
    )


@torch.no_grad()
def _plant(model: LlamaForCausalLM) -> None:
    for weight in model.parameters():
        weight.zero_()
    words = torch.tensor([planted_tokenizer().convert_tokens_to_ids(word) for word in WORDS])
    content = torch.arange(len(WORDS))
    calm = _calm_dims()[: len(WORDS)]
    layers = model.model.layers

    embed = model.model.embed_tokens.weight
    embed[:, _CONSTANT] = _LARGE
    embed[words, content] = 1.0
    embed[words, _FLAG] = 1.0
    for norm in [n for layer in layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]:
        norm.weight.fill_(_LARGE / math.sqrt(_D_MODEL))
    model.model.norm.weight.fill_(_LARGE / math.sqrt(_D_MODEL))

    scale = math.sqrt(D_HEAD)
    copier = layers[COPIER.layer].self_attn
    flag_dim = int(_calm_dims()[-1])
    copier.q_proj.weight[_rows(COPIER.head, flag_dim), _CONSTANT] = 12 * scale / _LARGE
    copier.k_proj.weight[_rows(0, flag_dim), _FLAG] = 1.0
    copier.v_proj.weight[_rows(0, content), content] = 1.0
    copier.o_proj.weight[_ANSWER + content, _rows(COPIER.head, content)] = 1.0

    planted = layers[PLANTED.layer].self_attn
    planted.q_proj.weight[_rows(PLANTED.head, calm), content] = 10 * scale
    planted.k_proj.weight[_rows(PLANTED.head // (N_HEADS // N_KV_HEADS), calm), content] = 1.0

    # score = -250 cos(w * distance), with w the speed of the slow pair: the farther, the higher.
    biased = layers[BIASED.layer].self_attn
    biased.q_proj.weight[_rows(BIASED.head, _SLOW), _CONSTANT] = 250 * scale / _LARGE
    biased.k_proj.weight[_rows(BIASED.head // (N_HEADS // N_KV_HEADS), _SLOW), _CONSTANT] = -1 / _LARGE

    model.lm_head.weight[words, _ANSWER + content] = 10.0
    model.lm_head.weight[planted_tokenizer().eos_token_id, _FLAG] = 100.0


@lru_cache
def planted_runner(dtype: torch.dtype = torch.float32) -> tuple[HFRunner, dict[str, HeadId]]:
    """The runner and its known heads; shared between tests, so do not change it."""
    model = AutoModelForCausalLM.from_config(_config(), attn_implementation=ATTENTION_NAME)
    _plant(model)
    runner = HFRunner(model.to(dtype), planted_tokenizer(), model_id="planted")
    return runner, {"planted": PLANTED, "biased": BIASED, "copier": COPIER}


def planted_samples(n: int, *, n_documents: int = 5, seed: int = 0) -> list[Sample]:
    """Questions with one or two golds (in turn) among `n_documents`.

    A question names two words. Every gold holds the first three times and the second twice, among other words;
    no distractor holds either. Documents have 11 to 13 words; golds are less dense in content words than distractors.
    The first word is the answer, and up to 14 documents no other word is as frequent.
    """
    chance = random.Random(seed)
    samples = []
    for number in range(n):
        key, second, *rest = chance.sample(WORDS, len(WORDS))
        others = cycle(rest)
        documents = []
        for place in range(n_documents):
            gold = place <= number % 2
            words = [key] * 3 + [second] * 2 if gold else []
            words += islice(others, 2 if gold else 9)
            words += chance.choices(_FILLERS, k=chance.randint(11, 13) - len(words))
            chance.shuffle(words)
            documents.append(Document(" ".join(words) + ".", id=f"d{place}", gold=gold, relevance=int(gold)))
        chance.shuffle(documents)
        samples.append(
            Sample(f"planted-{number}", f"{key} {second}?", tuple(documents), answer=key, dataset="planted")
        )
    return samples
