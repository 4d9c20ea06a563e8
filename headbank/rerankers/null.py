"""Attention of the content-free query, shared by all requests on the same documents."""

import hashlib
from collections import OrderedDict

from torch import Tensor

from headbank.types import HeadId, PromptLayout


def null_key(layout: PromptLayout, heads: tuple[HeadId, ...]) -> str:
    """Identifies the rows of heads over a content-free prompt; a digest, as prompts may outweigh their rows."""
    return hashlib.sha256(repr((layout, heads)).encode()).hexdigest()


class NullCache:
    """Rows [n, T] of heads over content-free prompts: least recently used goes first, bounded in bytes; one thread."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self.n_bytes = 0
        """Size of all rows that are kept."""

    def get(self, key: str) -> Tensor | None:
        """The rows, or None; counts as a use."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: str, rows: Tensor) -> None:
        """Keep rows that are not there yet, unless they alone are over the bound or not finite."""
        if rows.nbytes > self._max_bytes or not bool(rows.isfinite().all()):
            return
        self._kept[key] = rows
        self.n_bytes += rows.nbytes
        while self.n_bytes > self._max_bytes:
            self.n_bytes -= self._kept.popitem(last=False)[1].nbytes
