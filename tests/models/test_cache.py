"""The cache of documents by itself: bounds, order of use, tiers, threads."""

import random
import threading
from collections import OrderedDict

import pytest
import torch

from headbank.models import cache as caches
from headbank.models.cache import CacheCounts, DocumentCache, document_key
from headbank.models.packed import KeyValues

UNIT = 2 * 4 * 4
"""Bytes of one layer of a document of one token: keys and values of four float32 numbers."""


def document(tokens: int = 1, layers: int = 1, value: float = 0.0) -> KeyValues:
    layer = torch.full((2, 1, tokens, 4), value)
    return KeyValues((layer,) * layers, torch.arange(tokens))


def names(cache: DocumentCache) -> list[str]:
    """What is on the device, least recently used first."""
    return list(cache._device)


def test_the_key_tells_prefix_from_document() -> None:
    keys = [
        document_key(prefix, ids)
        for prefix, ids in (
            ((), (1, 2, 3)),
            ((1,), (2, 3)),
            ((1, 2), (3,)),
            ((1, 2, 3), ()),
            ((2,), (2, 3)),
            ((1,), (2, 4)),
            ((1,), (2, 3, 3)),
            ((), (0, 1, 2, 3)),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert document_key([1], [2, 3]) == keys[1]


def test_what_was_put_is_found() -> None:
    cache = DocumentCache(10 * UNIT)
    one = document(2, layers=3)
    assert one.n_bytes == 6 * UNIT
    assert cache.get("a", 1) is None
    cache.put("a", one)
    assert cache.get("a", 3) is one
    assert cache.get("b", 1) is None
    assert cache.counts == CacheCounts(hits=1, misses=2, device_bytes=6 * UNIT, host_bytes=0, documents=1)


def test_a_document_of_too_few_layers_is_not_found_until_it_is_replaced() -> None:
    cache = DocumentCache(10 * UNIT)
    cache.put("a", document(layers=2))
    assert cache.get("a", 3) is None
    assert cache.counts == CacheCounts(0, 1, 2 * UNIT, 0, 1)
    deep = document(layers=3)
    cache.put("a", deep)
    assert cache.get("a", 3) is cache.get("a", 1) is deep
    assert cache.counts == CacheCounts(2, 1, 3 * UNIT, 0, 1)


def test_the_least_recently_used_goes_first() -> None:
    cache = DocumentCache(3 * UNIT)
    for name in "abc":
        cache.put(name, document())
    cache.get("a", 1)
    # A miss for lack of layers is no use.
    cache.get("b", 2)
    cache.put("d", document())
    assert names(cache) == ["c", "a", "d"]
    cache.put("c", document())
    cache.put("e", document(2))
    assert names(cache) == ["c", "e"]
    assert cache.counts.device_bytes == 3 * UNIT


def test_a_document_larger_than_the_bound_is_not_kept() -> None:
    cache = DocumentCache(3 * UNIT)
    cache.put("a", document())
    cache.put("large", document(4))
    assert names(cache) == ["a"]
    # Nor is what it replaces: that is out of date.
    cache.put("a", document(1, layers=4))
    assert cache.counts == CacheCounts(0, 0, 0, 0, 0)
    cache.put("a", document(3))
    assert cache.counts.device_bytes == 3 * UNIT
    off = DocumentCache(0)
    off.put("a", document())
    assert off.get("a", 1) is None


def on_device(tokens: int = 1, layers: int = 1) -> KeyValues:
    return KeyValues(document(tokens, layers).layers, torch.arange(tokens, device="meta"))


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Documents whose positions are on `meta` stand for documents on a device; every move is recorded."""
    seen: list[str] = []

    def pinned(kept: KeyValues) -> KeyValues:
        seen.append("down")
        return KeyValues(kept.layers, torch.arange(len(kept.positions)))

    def moved(kept: KeyValues, device: torch.device) -> KeyValues:
        seen.append(f"up to {device}")
        return KeyValues(kept.layers, kept.positions.to(device))

    monkeypatch.setattr(caches, "_pinned", pinned)
    monkeypatch.setattr(caches, "_moved", moved)
    return seen


def test_what_falls_out_of_the_device_moves_to_the_host_and_back(moves: list[str]) -> None:
    cache = DocumentCache(2 * UNIT, 2 * UNIT)
    first = on_device()
    for name in "abc":
        cache.put(name, first if name == "a" else on_device())
    assert (names(cache), list(cache._host), moves) == (["b", "c"], ["a"], ["down"])
    found = cache.get("a", 1)
    assert found is not None
    assert found.layers == first.layers
    assert found.positions.device.type == "meta"
    assert (names(cache), list(cache._host)) == (["c", "a"], ["b"])
    assert moves == ["down", "up to meta", "down"]
    assert cache.counts == CacheCounts(1, 0, 2 * UNIT, UNIT, 3)


def test_the_host_is_bounded_too(moves: list[str]) -> None:
    cache = DocumentCache(2 * UNIT, 2 * UNIT)
    for name in "abcde":
        cache.put(name, on_device())
    assert (names(cache), list(cache._host)) == (["d", "e"], ["b", "c"])
    assert cache.get("a", 1) is None
    # One as large as the host pushes out the others there; one that is larger is lost.
    cache = DocumentCache(3 * UNIT, 2 * UNIT)
    for name, tokens in (("a", 1), ("b", 2), ("c", 1), ("d", 3), ("e", 3)):
        cache.put(name, on_device(tokens))
    assert (names(cache), list(cache._host)) == (["e"], ["c"])
    assert cache.counts == CacheCounts(0, 0, 3 * UNIT, UNIT, 2)


def test_a_shallow_document_on_the_host_is_not_moved(moves: list[str]) -> None:
    cache = DocumentCache(2 * UNIT, 4 * UNIT)
    cache.put("a", on_device(layers=2))
    cache.put("b", on_device())
    assert list(cache._host) == ["a"]
    assert cache.get("a", 3) is None
    assert list(cache._host) == ["a"]
    assert moves == ["down"]
    # Putting it again leaves no second copy.
    cache.put("a", on_device())
    assert (names(cache), list(cache._host)) == (["b", "a"], [])
    assert cache.counts == CacheCounts(0, 1, 2 * UNIT, 0, 2)


def test_without_a_device_there_is_one_tier(moves: list[str]) -> None:
    cache = DocumentCache(UNIT, 100 * UNIT)
    cache.put("a", document())
    cache.put("b", document())
    assert (names(cache), list(cache._host), moves) == (["b"], [], [])


def test_moves_keep_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moves themselves, where there is no device: pinning is left out."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    kept = document(3, layers=2, value=5.0)
    for there in (caches._pinned(kept), caches._moved(kept, torch.device("cpu"))):
        assert there.positions.tolist() == [0, 1, 2]
        assert [layer.tolist() for layer in there.layers] == [layer.tolist() for layer in kept.layers]


class Model:
    """The cache written plainly: two ordered dictionaries of sizes."""

    def __init__(self, device: int, host: int) -> None:
        self.limits = (device, host)
        self.tiers: tuple[OrderedDict[str, int], OrderedDict[str, int]] = (OrderedDict(), OrderedDict())

    def put(self, name: str, size: int) -> None:
        for tier in self.tiers:
            tier.pop(name, None)
        self._place(0, name, size)

    def _place(self, number: int, name: str, size: int) -> None:
        if number == 2 or size > self.limits[number]:
            return
        tier = self.tiers[number]
        tier[name] = size
        while sum(tier.values()) > self.limits[number]:
            self._place(number + 1, *tier.popitem(last=False))

    def get(self, name: str) -> bool:
        for tier in self.tiers:
            if name in tier:
                self.put(name, tier[name])
                return True
        return False


@pytest.mark.parametrize("seed", range(5))
def test_the_cache_does_as_two_plain_dictionaries(seed: int, moves: list[str]) -> None:
    chance = random.Random(seed)
    cache, model = DocumentCache(6 * UNIT, 4 * UNIT), Model(6, 4)
    hits = misses = 0
    for _ in range(400):
        name = chance.choice("abcdefgh")
        if chance.random() < 0.5:
            size = chance.randint(1, 7)
            cache.put(name, on_device(size))
            model.put(name, size)
        else:
            hit = cache.get(name, 1) is not None
            assert hit is model.get(name)
            hits, misses = hits + hit, misses + (not hit)
        assert [names(cache), list(cache._host)] == [list(tier) for tier in model.tiers]
        sizes = [sum(tier.values()) for tier in model.tiers]
        documents = sum(map(len, model.tiers))
        assert cache.counts == CacheCounts(hits, misses, UNIT * sizes[0], UNIT * sizes[1], documents)
    assert hits > 50 < misses


def test_threads_may_share_a_cache(moves: list[str]) -> None:
    cache = DocumentCache(6 * UNIT, 4 * UNIT)
    wrong: list[object] = []
    gets = 0
    lock = threading.Lock()

    def hammer(seed: int) -> None:
        nonlocal gets
        chance = random.Random(seed)
        for _ in range(2000):
            number = chance.randrange(9)
            try:
                if chance.random() < 0.5:
                    cache.put(str(number), on_device(1 + number % 3))
                else:
                    found = cache.get(str(number), 1)
                    with lock:
                        gets += 1
                    if found is not None and len(found.positions) != 1 + number % 3:
                        wrong.append(number)
                counts = cache.counts
                if counts.device_bytes > 6 * UNIT or counts.host_bytes > 4 * UNIT:
                    wrong.append(counts)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    counts = cache.counts
    assert counts.hits + counts.misses == gets
    assert counts.device_bytes == sum(kept.n_bytes for kept in cache._device.values())
    assert counts.host_bytes == sum(kept.n_bytes for kept, _ in cache._host.values())
    assert not set(cache._device) & set(cache._host)
