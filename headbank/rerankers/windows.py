"""Windows over a candidate set that does not fit one joint prompt."""

from collections.abc import Sequence


def windows(lengths: Sequence[int], room: int) -> list[range]:
    """Ranges of documents that each take at most `room` tokens, from the back, neighbours overlapping by half.

    `lengths` are tokens per document. Each window ends in the middle (counted in documents) of the one behind it, and
    takes as many documents before that point as fit (CoRe and ICR slide so, arXiv 2510.02219); it ends earlier where
    else the next document in front would not fit. A document longer than `room` has a window of its own. Together
    the windows hold every document. Raises ValueError for a room below 1.
    """
    if room < 1:
        raise ValueError(f"room must be at least 1, got {room}")
    found: list[range] = []
    end = len(lengths)
    while end > 0:
        start, total = end - 1, lengths[end - 1]
        while start > 0 and total + lengths[start - 1] <= room:
            start -= 1
            total += lengths[start]
        found.append(range(start, end))
        if start == 0:
            break
        end = start + (end - start) // 2
        while end > start and sum(lengths[start - 1 : end]) > room:
            end -= 1
    return found
