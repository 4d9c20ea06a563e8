"""Where the gold documents stand: the block of golds moves through the distractors (Expert Heads, ICLR 2026)."""

import hashlib
import random

from headbank.types import Sample


def placement_positions(n_distractors: int, count: int) -> tuple[int, ...]:
    """`count` of the m + 1 places for the gold block, evenly spread from the front to the back; p golds stand before
    distractor p, and p = m puts them last.

    A single placement is the middle one. Raises ValueError when there are fewer than `count` places.
    """
    if not 1 <= count <= n_distractors + 1:
        raise ValueError(
            f"{count} placements need at least {count - 1} distractors, there are {n_distractors}"
        )
    if count == 1:
        return (n_distractors // 2,)
    return tuple(round(i * n_distractors / (count - 1)) for i in range(count))


def placement_order(sample: Sample, position: int, seed: int) -> tuple[int, ...]:
    """Document indices in prompt order: distractors shuffled by seed and sample, golds as a block at `position`."""
    digest = hashlib.sha256(f"{seed}:{sample.id}".encode()).digest()
    distractors = list(sample.distractors)
    random.Random(digest).shuffle(distractors)
    return (*distractors[:position], *sample.golds, *distractors[position:])
