"""Captures with kept documents: the same numbers for less work."""

import random
import threading
from dataclasses import replace

import pytest
import torch

from headbank.models.base import CaptureRequest
from headbank.models.cache import CacheCounts, DocumentCache
from headbank.models.hf import HFRunner
from headbank.types import HeadId, PromptStyle
from tests.support.captures import (
    BOTH,
    DOCUMENTS,
    TOLERANCE,
    assert_same,
    mixed_requests,
    prompt,
    small_passes,
)
from tests.support.reference import PARALLEL
from tests.support.tiny_models import FAMILIES, Work, tiny_model, tiny_runner, tiny_tokenizer


def caching(family: str = "llama", dtype: torch.dtype = torch.float64, size: int = 1 << 30) -> HFRunner:
    """A runner with an empty cache over the shared tiny model."""
    return HFRunner(
        tiny_model(family, dtype), tiny_tokenizer(), model_id=family, documents=DocumentCache(size)
    )


def tokens_of(runner: HFRunner, *requests: CaptureRequest) -> int:
    with Work(runner._model) as work:
        runner.capture_many(requests)
    return sum(work.tokens)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_captures_are_the_same_with_and_without(family: str, dtype: torch.dtype) -> None:
    plain, runner = tiny_runner(family, dtype), caching(family, dtype)
    requests = mixed_requests(plain)
    expected = plain.capture_many(requests)
    assert runner.documents is not None
    for turn in range(2):
        for capture, alone in zip(runner.capture_many(requests), expected, strict=True):
            assert_same(capture, alone, TOLERANCE[dtype])
        assert (runner.documents.counts.hits > 0) is (turn == 1)


@pytest.mark.parametrize("size", [0, 5000, 20000])
def test_a_cache_too_small_for_the_request_changes_nothing(size: int) -> None:
    plain, runner = tiny_runner("gemma2", torch.float64), caching("gemma2", size=size)
    requests = mixed_requests(plain)
    expected = plain.capture_many(requests)
    for _ in range(2):
        for capture, alone in zip(runner.capture_many(requests), expected, strict=True):
            assert_same(capture, alone, 1e-12)
    assert runner.documents is not None
    assert runner.documents.counts.device_bytes <= size


def test_small_passes_and_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents longer than a pass are not kept, the others are."""
    plain, runner = tiny_runner("mistral", torch.float64), caching("mistral")
    requests = mixed_requests(plain)
    expected = plain.capture_many(requests)
    small_passes(monkeypatch, 30)
    for _ in range(2):
        for capture, alone in zip(runner.capture_many(requests), expected, strict=True):
            assert_same(capture, alone, 1e-12)
    assert runner.documents is not None
    assert 0 < runner.documents.counts.documents < 5


def test_a_second_query_on_the_same_documents_computes_its_tail_only() -> None:
    runner = caching()
    a, b, c = DOCUMENTS
    first = prompt(runner, style=PARALLEL)
    second = prompt(runner, [c, a, b], "Who lit the lamp?", PARALLEL)
    third = prompt(runner, [b, "Ada.", b], "Who lit the lamp?", PARALLEL)
    assert tokens_of(runner, CaptureRequest(first)) == first.length
    assert tokens_of(runner, CaptureRequest(second)) == second.length - second.tail_start
    assert (
        tokens_of(runner, CaptureRequest(third)) == third.length - third.tail_start + third.blocks[1].length
    )
    assert runner.documents is not None
    counts = runner.documents.counts
    # Three documents each for the first two, two for the third (b is asked for once). The prefix is kept, not counted.
    assert (counts.hits, counts.misses, counts.documents) == (3 + 1, 3 + 1, 5)
    expected = tiny_runner("llama", torch.float64).capture(CaptureRequest(third))
    assert_same(runner.capture(CaptureRequest(third)), expected, 1e-12)


def test_a_joint_prompt_is_not_kept() -> None:
    runner = caching()
    for style in (PromptStyle(), PromptStyle("parallel", query_first=True)):
        layout = prompt(runner, style=style)
        for _ in range(2):
            assert tokens_of(runner, CaptureRequest(layout)) == layout.length
    assert runner.documents is not None
    assert runner.documents.counts == CacheCounts(0, 0, 0, 0, 0)


def test_documents_of_few_layers_serve_shallow_requests_and_are_replaced_for_deep_ones() -> None:
    runner, plain = caching(), tiny_runner("llama", torch.float64)
    layout = prompt(runner, style=PARALLEL)
    tail = layout.length - layout.tail_start
    shallow = CaptureRequest(layout, (HeadId(1, 0),))
    deep = CaptureRequest(layout, (HeadId(1, 0),), BOTH, 3)
    assert tokens_of(runner, shallow) == layout.length
    assert runner.documents is not None
    two_layers = runner.documents.counts.device_bytes
    assert tokens_of(runner, replace(shallow, heads=(HeadId(0, 3),))) == tail
    with Work(runner._model) as work:
        assert_same(runner.capture(deep), plain.capture(deep), 1e-12)
    assert work.tokens[0] == layout.length
    assert runner.documents.counts.device_bytes * 2 == two_layers * 3
    assert runner.documents.counts.documents == 4
    for request in (deep, shallow):
        with Work(runner._model) as work:
            assert_same(runner.capture(request), plain.capture(request), 1e-12)
        assert work.tokens[0] == tail


def test_captures_in_threads_may_share_a_cache() -> None:
    """A cache with room for a part of the documents, so that threads also push out what others use."""
    plain, runner = tiny_runner("llama", torch.float64), caching(size=60_000)
    requests = mixed_requests(plain)
    expected = [plain.capture(request) for request in requests]
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for i in chance.sample(range(len(requests)), len(requests)):
                assert_same(runner.capture(requests[i]), expected[i], 1e-12)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_pass_that_fails_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = caching()
    layout = prompt(runner, style=PARALLEL)
    monkeypatch.setattr("headbank.models.hf.Pass.finish", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.capture(CaptureRequest(layout))
    assert runner.documents is not None
    assert runner.documents.counts.documents == 0
    monkeypatch.undo()
    assert tokens_of(runner, CaptureRequest(layout)) == layout.length
