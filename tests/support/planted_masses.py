"""Attention of made-up heads over samples whose golds move: what a detector must find, and what it must not."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headbank.types import HeadId

LAYERS, HEADS = 3, 4
PLANTED = HeadId(1, 2)
"""Attends to the golds, wherever they stand."""
POSITION = HeadId(0, 1)
"""Attends to document 0, whatever it is and whatever the query."""


def row(head: HeadId) -> int:
    """The head's row once [L, H, D] is flattened to [L * H, D]."""
    return head.layer * HEADS + head.head


@dataclass(frozen=True)
class PlantedSample:
    mass: Tensor
    """[L, H, D]"""
    null_mass: Tensor
    """The same for a content-free query."""
    gold: Tensor


def planted_samples(count: int = 40, seed: int = 0) -> list[PlantedSample]:
    """Samples of 6 to 9 documents with 1 to 4 golds in random places; all other heads are noise."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        documents = int(rng.integers(6, 10))
        gold = np.zeros(documents, dtype=bool)
        gold[rng.permutation(documents)[: rng.integers(1, 5)]] = True
        mass, null = rng.uniform(0.001, 0.01, (2, LAYERS, HEADS, documents))
        mass[PLANTED][gold] += rng.uniform(0.04, 0.06, gold.sum())
        mass[POSITION][0] += 0.5
        null[POSITION][0] += 0.5
        samples.append(PlantedSample(*(torch.from_numpy(x) for x in (mass, null, gold))))
    return samples
