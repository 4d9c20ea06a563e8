"""The recipe of `headbank/jobs/dump.py`, with nothing but plain transformers."""

from typing import Any

import torch

from tests.support.tiny_models import eager

Dump = dict[str, Any]


def attentions(model: Any, dump: Dump, prefix: str = "") -> list[torch.Tensor]:
    """Rows of every layer [H, T + R, T + R] by the recipe: eager attention, positions, a mask."""
    ids, positions = (torch.from_numpy(dump[prefix + name]) for name in ("ids", "positions"))
    sees = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    if str(dump[prefix + "layout"]) == "parallel":
        block = torch.full((len(ids),), -1)
        for number, (start, end) in enumerate(dump[prefix + "blocks"]):
            block[start:end] = number
        sees &= (block[:, None] == block) | (block[:, None] < 0) | (block < 0)
    near = positions[:, None] - positions

    def additive(mask: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(model.dtype).min
        return torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, lowest)[None, None]

    window = getattr(model.config, "sliding_window", None)
    mask: Any = additive(sees)
    if window is not None:
        mask = {"full_attention": mask, "sliding_attention": additive(sees & (near < window))}
    with eager(model) as plain, torch.no_grad():
        out = plain(
            ids[None],
            position_ids=positions[None],
            attention_mask=mask,
            output_attentions=True,
            use_cache=False,
        )
    return [layer[0].double() for layer in out.attentions]


def masses(model: Any, dump: Dump) -> tuple[list[list[float]], list[float]]:
    """Mass per head and document, and per head on the prefix and the tail."""
    found = attentions(model, dump)
    mass, reference = [], []
    for layer, head in dump["heads"]:
        row = found[layer][head, dump["source"], : dump["prompt_tokens"]].mean(0)
        mass.append([float(row[start:end].sum()) for start, end in dump["spans"]])
        reference.append(float(row[: dump["prefix_end"]].sum() + row[dump["tail_start"] :].sum()))
    return mass, reference
