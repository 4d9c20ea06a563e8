"""A small bank with every kind of content, made from arithmetic alone."""

from typing import Any

import torch

from headbank.bank import Bank
from headbank.types import VIEWS, HeadId, HeadSet, ModelInfo, View

PLACEMENTS, LAYERS, HEADS = 3, 6, 4


def model_info(**changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "model_id": "Owner/Tiny-Model",
        "revision": "r1",
        "config_hash": "c0ffee",
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": 2,
        "d_model": 32,
        "d_head": 8,
        "context_tokens": 2048,
        "windows": (None, 16, None, 16, None, 16),
        "tokenizer_hash": "70ce",
        "template_hash": "7e3a",
        "norm_hashes": tuple(f"n{layer}" for layer in range(LAYERS)),
        "dtype": "float32",
    }
    return ModelInfo(**(fields | changes))


def _head_set(view: View) -> HeadSet:
    heads = (HeadId(4, 1), HeadId(2, 3), HeadId(5, 0))
    metrics: dict[str, object] = {
        "ndcg_at_2": 0.1 + 0.2,
        "samples": 7,
        "by_aggregation": {"borda": [0.5, 0.75]},
    }
    return HeadSet(f"expert_{view}", view, heads, "borda", 2, metrics)


def _maps(view: View) -> dict[str, torch.Tensor]:
    cells = torch.arange(PLACEMENTS * LAYERS * HEADS, dtype=torch.float64).reshape(PLACEMENTS, LAYERS, HEADS)
    expert = torch.zeros(LAYERS, HEADS, dtype=torch.uint8)
    expert[4, 1] = expert[2, 3] = 1
    sensitive = expert.clone()
    sensitive[2] = 1
    return {
        f"expert.{view}.frequency": cells / cells.max(),
        f"expert.{view}.strength": (cells / 7).sin().abs().float(),
        f"expert.{view}.soft": 1 - cells / (2 * cells.max()),
        f"expert.{view}.expert": expert,
        f"expert.{view}.sensitive": sensitive,
    }


def sample_bank(**changes: Any) -> Bank:
    sets = [_head_set(view) for view in VIEWS]
    fields: dict[str, Any] = {
        "info": model_info(),
        "layout": "joint",
        "head_sets": {heads.name: heads for heads in sets},
        "maps": {name: values for view in VIEWS for name, values in _maps(view).items()},
        "training": {
            "data": {"name": "musique", "sha256": "da7a"},
            "sample_ids": ["s1", "s2", "s-ü"],
            "seed": 0,
            "thresholds": {"tau_f": 0.6, "tau_p": 0.9},
            "rejected": {"too_long": 1},
            "options": {"placements": None, "chat": True},
        },
    }
    return Bank(**(fields | changes))
