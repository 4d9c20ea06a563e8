"""Keys and values of documents, kept for later queries: least recently used goes first, bounded in bytes."""

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headbank.models.packed import KeyValues


@dataclass(frozen=True)
class CacheCounts:
    """What the cache did and holds."""

    hits: int
    misses: int
    device_bytes: int
    host_bytes: int
    documents: int
    """Stretches kept, prefixes among them."""


def document_key(prefix: Sequence[int], document: Sequence[int]) -> str:
    """Identifies a document's keys and values under one model: what stands before it, and its tokens."""
    return hashlib.sha256(array("q", [len(prefix), *prefix, *document]).tobytes()).hexdigest()


class DocumentCache:
    """Two tiers: device memory, then pinned host memory for what falls out of it. Safe to share between threads.

    A document found in host memory moves back to the device. Where the model runs on the processor there is one
    memory, and the second tier stays empty.
    """

    def __init__(self, device_bytes: int, host_bytes: int = 0) -> None:
        """Bounds of the tiers in bytes; a document larger than the first is not kept."""
        self._device_limit, self._host_limit = device_bytes, host_bytes
        self._device: OrderedDict[str, KeyValues] = OrderedDict()
        self._host: OrderedDict[str, tuple[KeyValues, torch.device]] = OrderedDict()
        self._device_bytes = self._host_bytes = self._hits = self._misses = 0
        self._lock = threading.Lock()

    @property
    def counts(self) -> CacheCounts:
        """Hits, misses and sizes so far."""
        with self._lock:
            return CacheCounts(
                self._hits,
                self._misses,
                self._device_bytes,
                self._host_bytes,
                len(self._device) + len(self._host),
            )

    def get(self, key: str, depth: int, *, counted: bool = True) -> KeyValues | None:
        """A document's keys and values of at least `depth` layers on the device, or None; it is a use.

        `counted` False leaves hits and misses as they are: for the prefix, which is no document.
        """
        with self._lock:
            found = self._device.get(key)
            if found is None and key in self._host and len(self._host[key][0].layers) >= depth:
                kept, device = self._host.pop(key)
                self._host_bytes -= kept.n_bytes
                found = _moved(kept, device)
                self._keep(key, found)
            if found is None or len(found.layers) < depth:
                self._misses += counted
                return None
            self._hits += counted
            if key in self._device:
                self._device.move_to_end(key)
            return found

    def put(self, key: str, document: KeyValues) -> None:
        """Keep a document, replacing what was known of it; the least recently used ones make room."""
        with self._lock:
            old = self._device.pop(key, None)
            if old is not None:
                self._device_bytes -= old.n_bytes
            if key in self._host:
                self._host_bytes -= self._host.pop(key)[0].n_bytes
            self._keep(key, document)

    def _keep(self, key: str, document: KeyValues) -> None:
        if document.n_bytes > self._device_limit:
            return
        self._device[key] = document
        self._device_bytes += document.n_bytes
        while self._device_bytes > self._device_limit:
            name, oldest = self._device.popitem(last=False)
            self._device_bytes -= oldest.n_bytes
            self._demote(name, oldest)

    def _demote(self, key: str, document: KeyValues) -> None:
        device = document.positions.device
        if device.type == "cpu" or document.n_bytes > self._host_limit:
            return
        self._host[key] = (_pinned(document), device)
        self._host_bytes += document.n_bytes
        while self._host_bytes > self._host_limit:
            _, (oldest, _) = self._host.popitem(last=False)
            self._host_bytes -= oldest.n_bytes


def _moved(document: KeyValues, device: torch.device) -> KeyValues:
    layers = tuple(layer.to(device, non_blocking=True) for layer in document.layers)
    return KeyValues(layers, document.positions.to(device, non_blocking=True))


def _pinned(document: KeyValues) -> KeyValues:
    layers = tuple(layer.cpu().pin_memory() for layer in document.layers)
    return KeyValues(layers, document.positions.cpu())
