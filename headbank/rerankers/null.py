"""Attention of the content-free query, shared by all requests on the same documents."""

from collections import OrderedDict

from torch import Tensor

from headbank.types import HeadId, PromptLayout

NullKey = tuple[PromptLayout, tuple[HeadId, ...]]
"""The content-free prompt and the heads read over it."""


class NullCache:
    """Rows [n, T] of heads over content-free prompts: least recently used goes first, bounded in bytes; one thread."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[NullKey, Tensor] = OrderedDict()

    def get(self, key: NullKey) -> Tensor | None:
        """The rows, or None; counts as a use."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: NullKey, rows: Tensor) -> None:
        """Keep rows that are not there yet."""
        self._kept[key] = rows
        self._bytes += rows.nbytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
