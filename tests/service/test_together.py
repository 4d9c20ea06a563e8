"""A real model behind the queue: requests that share batches get what each gets alone."""

import asyncio
import random

import pytest

from headbank.types import RankOptions
from service.engine import Job
from service.settings import Settings
from service.worker import Worker
from tests.service.tiny import load_tiny

WORDS = (
    "lamp",
    "river",
    "stone",
    "amber",
    "cedar",
    "falcon",
    "garnet",
    "heron",
    "indigo",
    "jasmine",
    "kestrel",
)

KINDS = (
    ("heads", {}),
    ("heads", {"layout": "parallel"}),
    ("heads", {"layout": "parallel", "aggregation": "calibrated"}),
    ("heads", {"aggregation": "share"}),
    ("heads", {"aggregation": "borda", "explain": True}),
    ("heads", {"view": "response"}),
    ("heads", {"view": "response", "layout": "parallel", "max_tokens_per_doc": 20}),
    ("icr", {}),
    ("icr", {"layout": "parallel"}),
    ("fusion", {}),
    ("fusion", {"layout": "parallel", "view": "response"}),
    ("bm25", {}),
    ("dense", {}),
    ("llm", {}),
)


def jobs(count):
    """Requests of every kind in turn; many documents come in several of them."""
    chance = random.Random(3)
    pool = [" ".join(chance.choices(WORDS, k=chance.randint(1, 12))) + "." for _ in range(12)] + [""]
    made = []
    for number in range(count):
        method, options = KINDS[number % len(KINDS)]
        query = "Which " + " ".join(chance.sample(WORDS, 2)) + "?"
        documents = tuple(chance.choices(pool, k=chance.randint(1, 4)))
        made.append(Job(f"id-{number}", method, query, documents, RankOptions(**options)))
    # Who cannot be answered.
    made[50] = Job("id-50", "heads", "lamp " * 600, ("amber",), RankOptions())
    made[60] = Job("id-60", "heads", "lamp", ("amber",), RankOptions(max_tokens_per_doc=0, layout="parallel"))
    return made


def test_a_hundred_mixed_requests_at_once_get_what_each_gets_alone():
    requests = jobs(100)
    plain = load_tiny(Settings(model="tiny", document_cache_bytes=0))
    alone = [plain.rank_many([job])[0] for job in requests]
    sizes = []

    async def at_once():
        worker = Worker(
            Settings(model="tiny", queue_requests=100, batch_tokens=2000, request_timeout_s=300), load_tiny
        )
        worker.on_batch = lambda *size: sizes.append(size)
        await worker.start()
        try:
            async with asyncio.timeout(300):
                while worker.state != "ready":
                    assert worker.state == "starting", worker.reason
                    await asyncio.sleep(0.05)
            found = await asyncio.gather(*map(worker.submit, requests), return_exceptions=True)
            return found, worker.cache
        finally:
            await worker.stop()

    together, cache = asyncio.run(at_once())
    for job, expected, found in zip(requests, alone, together, strict=True):
        assert type(found) is type(expected), job
        if isinstance(expected, Exception):
            assert str(found) == str(expected)
            continue
        assert found.scores == pytest.approx(expected.scores, abs=1e-5), job
        assert found.order == expected.order, job
        assert (found.cut, found.input_tokens, found.method) == (
            expected.cut,
            expected.input_tokens,
            "bm25" if job.method == "dense" else job.method,
        )
        for vote, vote_alone in zip(found.votes, expected.votes, strict=True):
            assert vote.mass == pytest.approx(vote_alone.mass, abs=1e-5)
    assert sum(isinstance(found, Exception) for found in together) == 2
    assert sum(count for count, _ in sizes) == 100
    assert max(count for count, _ in sizes) >= 5
    assert all(tokens <= 2000 for count, tokens in sizes if count > 1)
    assert cache.hits > 0
    assert cache.documents > 0
