"""Which of the waiting requests go to the engine together."""

import asyncio

import pytest

from headbank.types import RankOptions
from service.engine import Job
from service.queue import DOCUMENT_TOKENS, PROMPT_TOKENS, Pending, Queue, estimated_tokens


def job(query="", documents=(), limit=None):
    return Job("id", "heads", query, documents, RankOptions(max_tokens_per_doc=limit))


def filled(*sizes, alone=(), deadline=100.0):
    loop = asyncio.new_event_loop()
    queue, waiting = Queue(), []
    for number, size in enumerate(sizes):
        waiting.append(Pending(job(str(number)), loop.create_future(), 0.0, deadline, size, number in alone))
        queue.add(waiting[-1])
    loop.close()
    return queue, waiting


def batches(queue, budget):
    taken = []
    while batch := queue.take(budget, now=1.0):
        taken.append([int(pending.job.query) for pending in batch])
    return taken


@pytest.mark.parametrize(
    ("sizes", "alone", "expected"),
    [
        ((), (), []),
        ((4, 3, 3), (), [[0, 1, 2]]),
        ((4, 3, 4), (), [[0, 1], [2]]),
        ((4, 7, 1, 1), (), [[0], [1, 2, 3]]),
        # A giant goes alone, wherever it stands.
        ((1, 50, 1, 1), (), [[0], [1], [2, 3]]),
        ((50, 1), (), [[0], [1]]),
        ((1, 1, 1, 1), (1,), [[0], [1], [2, 3]]),
        ((1, 1, 1, 1), (0, 1), [[0], [1], [2, 3]]),
    ],
)
def test_neighbours_go_together_as_far_as_they_fit_and_keep_their_order(sizes, alone, expected):
    assert batches(filled(*sizes, alone=alone)[0], 10) == expected


def test_who_has_left_or_is_too_late_is_dropped_before_it_takes_room():
    queue, waiting = filled(6, 6, 4, 1)
    waiting[0].answer.cancel()
    waiting[2].deadline = 1.0
    assert batches(queue, 10) == [[1, 3]]
    assert len(queue) == 0


def test_a_batch_put_back_is_first_again_in_its_order():
    queue, _ = filled(4, 4, 4)
    batch = queue.take(8, now=1.0)
    assert len(queue) == 1
    queue.put_back(batch)
    assert len(queue) == 3
    assert batches(queue, 100) == [[0, 1, 2]]


def test_discarded_and_drained_requests_are_gone():
    queue, waiting = filled(1, 1, 1)
    queue.discard(waiting[1])
    queue.discard(waiting[1])
    assert queue.drain() == [waiting[0], waiting[2]]
    assert len(queue) == 0
    assert queue.take(10, now=1.0) == []


@pytest.mark.parametrize(
    ("query", "documents", "limit", "text_tokens"),
    [
        ("", (), None, 0),
        ("four", ("12345678", "1"), None, 1 + 2 + 1),
        ("", ("x" * 4000, "y" * 40), 100, 100 + 10),
        # Three bytes a character: 3/4 of a token.
        ("", ("漢字漢字",), None, 3),
        ("\ud800", ("",), None, 1),
    ],
)
def test_tokens_are_estimated_from_bytes(query, documents, limit, text_tokens):
    fixed = PROMPT_TOKENS + DOCUMENT_TOKENS * len(documents)
    assert estimated_tokens(job(query, documents, limit)) == fixed + text_tokens
