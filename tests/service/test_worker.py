"""The engine process and its queue, with engines that do what they are told."""

import asyncio
import multiprocessing
import os
import signal
import time

import pytest

from headbank.errors import (
    BankError,
    EngineError,
    EngineOverloaded,
    EngineUnavailable,
    InputTooLong,
    NonFiniteScore,
)
from headbank.types import RankOptions
from service.engine import CacheCounts, Job
from service.errors import DeadlineExceeded, InternalError
from service.settings import Settings
from service.worker import Worker
from tests.service.engines import load_bug, load_dies, load_mismatch, load_never, load_once, load_scripted


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("service.worker.FIRST_BACKOFF_S", 0.05)


def job(query, documents=("a", "ccc", "bb")):
    return Job(f"id-{query}", "heads", query, documents, RankOptions())


async def until(condition, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def with_worker(scenario, load=load_scripted, **options):
    async def run():
        worker = Worker(Settings(**{"model": "scripted", "batch_tokens": 1, **options}), load)
        await worker.start()
        try:
            await until(lambda: worker.state != "starting")
            return await scenario(worker)
        finally:
            await worker.stop()

    return asyncio.run(run())


def pid_of(worker):
    [child] = [p for p in multiprocessing.active_children() if p.name == "headrank-engine"]
    assert worker.state == "ready"
    return child.pid


def test_ranking_comes_back_with_its_time_in_the_queue():
    async def scenario(worker):
        return await worker.submit(job("plain"))

    ranking = with_worker(scenario)
    assert ranking.order == (1, 2, 0)
    assert ranking.scores == (0.5, 0.75, 2 / 3)
    assert ranking.seconds["forward"] == 0.002
    assert 0 <= ranking.seconds["queue"] < 5


def test_errors_keep_their_class_and_never_carry_text_of_a_bug():
    async def scenario(worker):
        with pytest.raises(InputTooLong) as too_long:
            await worker.submit(job("long"))
        assert (too_long.value.field, too_long.value.limit) == ("documents", 7)
        with pytest.raises(NonFiniteScore):
            await worker.submit(job("nan"))
        with pytest.raises(InternalError) as bug:
            await worker.submit(job("bug in a secret"))
        assert str(bug.value) == "internal error, request id-bug in a secret"
        # The process lives on.
        assert worker.restarts == 0
        return await worker.submit(job("plain"))

    assert with_worker(scenario).order == (1, 2, 0)


def test_large_input_passes_the_pipe():
    documents = tuple(str(i) * 100_000 for i in range(40))

    async def scenario(worker):
        return await worker.submit(job("plain", documents))

    assert len(with_worker(scenario).scores) == 40


def test_full_queue_refuses_at_once_with_a_hint():
    async def scenario(worker):
        slow = [asyncio.create_task(worker.submit(job(f"sleep 0.3 {i}"))) for i in range(3)]
        await until(lambda: worker.waiting == 2)
        started = time.monotonic()
        with pytest.raises(EngineOverloaded) as refused:
            await worker.submit(job("plain"))
        assert time.monotonic() - started < 0.1
        assert 0 < refused.value.retry_after_s <= 60
        assert len(await asyncio.gather(*slow)) == 3
        # And the place is free again.
        return await worker.submit(job("plain"))

    assert with_worker(scenario, queue_requests=2).order == (1, 2, 0)


def test_idle_engine_takes_a_burst_of_the_queue_and_one_more():
    async def scenario(worker):
        return await asyncio.gather(
            *(worker.submit(job("sleep 0.05")) for _ in range(4)), return_exceptions=True
        )

    answers = with_worker(scenario, queue_requests=2)
    assert [isinstance(a, EngineOverloaded) for a in answers] == [False, False, False, True]


def test_cancelled_request_leaves_the_queue_and_is_never_computed(tmp_path):
    log = tmp_path / "log"

    async def scenario(worker):
        slow = asyncio.create_task(worker.submit(job("sleep 0.3")))
        await until(lambda: log.exists())
        doomed = asyncio.create_task(worker.submit(job("doomed")))
        await until(lambda: worker.waiting == 1)
        doomed.cancel()
        await asyncio.gather(doomed, return_exceptions=True)
        assert worker.waiting == 0
        await slow
        await worker.submit(job("last"))

    with_worker(scenario, bank=log)
    assert log.read_text().splitlines() == ["sleep 0.3", "last"]


def test_deadline_in_the_queue_and_in_the_engine(tmp_path):
    log = tmp_path / "log"

    async def scenario(worker):
        results = await asyncio.gather(
            worker.submit(job("sleep 0.5")), worker.submit(job("doomed")), return_exceptions=True
        )
        assert [type(r) for r in results] == [DeadlineExceeded, DeadlineExceeded]
        await asyncio.sleep(0.25)
        await worker.submit(job("last"))
        assert worker.restarts == 0

    with_worker(scenario, bank=log, request_timeout_s=0.3)
    assert log.read_text().splitlines() == ["sleep 0.5", "last"]


def test_stuck_engine_is_replaced():
    async def scenario(worker):
        with pytest.raises(DeadlineExceeded):
            await worker.submit(job("sleep 600"))
        await until(lambda: worker.state == "restarting")
        assert "gave no answer" in worker.reason
        await until(lambda: worker.state == "ready")
        return await worker.submit(job("plain"))

    assert with_worker(scenario, request_timeout_s=0.5).order == (1, 2, 0)


def test_killed_engine_fails_its_request_only_and_comes_back():
    async def scenario(worker):
        slow = asyncio.create_task(worker.submit(job("sleep 30")))
        await until(lambda: worker._busy)
        waiting = asyncio.create_task(worker.submit(job("patient")))
        await asyncio.sleep(0)
        os.kill(pid_of(worker), signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="ended while it worked"):
            await slow
        await until(lambda: worker.state == "restarting")
        assert worker.reason == "the engine process ended with exit code -9"
        with pytest.raises(EngineUnavailable, match="restarting"):
            await worker.submit(job("impatient"))
        ranking = await waiting
        assert worker.state == "ready"
        assert worker.restarts == 1
        return ranking

    assert with_worker(scenario).order == (1, 2, 0)


def test_engine_that_ends_while_idle_comes_back():
    async def scenario(worker):
        old = pid_of(worker)
        os.kill(old, signal.SIGKILL)
        await until(lambda: worker.state == "restarting")
        assert worker.reason == "the engine process ended with exit code -9"
        await until(lambda: worker.state == "ready")
        assert pid_of(worker) != old
        return await worker.submit(job("plain"))

    assert with_worker(scenario).order == (1, 2, 0)


def test_failing_restart_is_tried_again(tmp_path):
    mark = tmp_path / "mark"

    async def scenario(worker):
        os.kill(pid_of(worker), signal.SIGKILL)
        await until(lambda: worker.restarts == 2)
        assert worker.reason == "the engine process ended with exit code 9"
        assert worker.fatal is None
        mark.unlink()
        await until(lambda: worker.state == "ready")

    with_worker(scenario, load_once, bank=mark)


def test_answer_out_of_turn_replaces_the_engine():
    async def scenario(worker):
        with pytest.raises(EngineUnavailable):
            await worker.submit(job("nonsense"))
        await until(lambda: worker.state == "ready")
        return await worker.submit(job("plain"))

    assert with_worker(scenario).order == (1, 2, 0)


@pytest.mark.parametrize(
    ("load", "timeout_s", "kind", "message"),
    [
        (load_mismatch, 60, BankError, "template_hash is 'new', the bank has 'old'; recalibrate with"),
        (load_bug, 60, EngineError, "the engine failed to start: KeyError: 'config'"),
        (load_dies, 60, EngineError, "the engine process ended with exit code 3"),
        (load_never, 0.5, EngineError, "the engine process gave no answer for 0.5 s"),
    ],
)
def test_first_start_that_fails_is_final(load, timeout_s, kind, message):
    async def scenario(worker):
        assert worker.state == "failed"
        assert isinstance(worker.fatal, kind)
        assert message in str(worker.fatal)
        assert message in worker.reason
        with pytest.raises(EngineUnavailable, match="failed"):
            await worker.submit(job("plain"))

    with_worker(scenario, load, start_timeout_s=timeout_s)


def test_stop_fails_what_still_waits():
    async def scenario(worker):
        tasks = [asyncio.create_task(worker.submit(job(f"sleep 30 {i}"))) for i in range(3)]
        await until(lambda: worker._busy)
        started = time.monotonic()
        await worker.stop()
        assert time.monotonic() - started < 3
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [EngineUnavailable] * 3

    with_worker(scenario)


# Batches


def together(*queries, documents=("a", "ccc", "bb"), method="heads", **options):
    """Results of requests that waited at the same time, while the engine was busy with another; and the worker."""

    async def scenario(worker):
        first = asyncio.create_task(worker.submit(job("sleep 0.3")))
        await until(lambda: worker._busy)
        jobs = [Job(f"id-{query}", method, query, documents, RankOptions()) for query in queries]
        tasks = [asyncio.create_task(worker.submit(each)) for each in jobs]
        await first
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: worker.state == "ready")
        return results, worker

    return with_worker(scenario, **{"batch_tokens": 16384, **options})


def computed(log):
    return log.read_text().splitlines()


def test_requests_that_wait_are_answered_together(tmp_path):
    async def scenario(worker):
        sizes = []
        worker.on_batch = lambda *size: sizes.append(size)
        first = asyncio.create_task(worker.submit(job("sleep 0.3")))
        await until(lambda: worker._busy)
        rest = [worker.submit(job(f"plain {n}", ("x" * n, "xxx", "xx"))) for n in (1, 4, 2)]
        answers = await asyncio.gather(*rest)
        await first
        return [answer.order for answer in answers], sizes

    orders, sizes = with_worker(scenario, bank=tmp_path / "log", batch_tokens=16384)
    assert orders == [(1, 2, 0), (0, 1, 2), (1, 0, 2)]
    assert computed(tmp_path / "log") == ["sleep 0.3", "plain 1 | plain 4 | plain 2"]
    # 64 tokens of a prompt, 2 or 3 of the query, 8 and 1 of each of 3 documents.
    assert sizes == [(1, 64 + 3 + 27), (3, 3 * (64 + 2 + 27))]


def test_a_batch_ends_where_the_next_does_not_fit(tmp_path):
    together("one", "two", "three", bank=tmp_path / "log", batch_tokens=200)
    assert computed(tmp_path / "log") == ["sleep 0.3", "one | two", "three"]


def test_a_writing_request_goes_alone(tmp_path):
    together("one", "two", method="llm", bank=tmp_path / "log")
    assert computed(tmp_path / "log") == ["sleep 0.3", "one", "two"]


def test_a_request_that_fails_harms_none_of_its_batch(tmp_path):
    results, worker = together("plain", "bug", "nan", "long", "again", bank=tmp_path / "log")
    assert [type(r).__name__ for r in results] == [
        "Ranking",
        "InternalError",
        "NonFiniteScore",
        "InputTooLong",
        "Ranking",
    ]
    assert str(results[1]) == "internal error, request id-bug"
    # Each once more, alone.
    batch = ["plain", "bug", "nan", "long", "again"]
    assert computed(tmp_path / "log") == ["sleep 0.3", " | ".join(batch), *batch]
    assert worker.restarts == 0


@pytest.mark.parametrize("verb", ["die", "device", "nonsense"])
def test_a_request_that_ends_the_engine_harms_none_of_its_batch(verb, tmp_path):
    results, worker = together("plain", verb, "again", bank=tmp_path / "log")
    assert [type(r).__name__ for r in results] == ["Ranking", "EngineUnavailable", "Ranking"]
    assert "while it worked on this request" in str(results[1])
    assert worker.restarts == 2
    assert computed(tmp_path / "log") == ["sleep 0.3", f"plain | {verb} | again", "plain", verb, "again"]


def test_counts_of_the_cache_add_up_over_engines():
    async def scenario(worker):
        await worker.submit(job("plain"))
        await worker.submit(job("plain"))
        assert worker.cache == CacheCounts(hits=2, misses=1, device_bytes=7, host_bytes=5, documents=1)
        os.kill(pid_of(worker), signal.SIGKILL)
        await until(lambda: worker.restarts == 1)
        assert worker.cache == CacheCounts(hits=2, misses=1)
        await until(lambda: worker.state == "ready")
        await worker.submit(job("plain"))
        return worker.cache

    assert with_worker(scenario) == CacheCounts(hits=3, misses=2, device_bytes=7, host_bytes=5, documents=1)
