"""The parent's side of the engine: one child process, a bounded queue in front of it, restarts after it.

Everything here runs on the event loop and never blocks it; what blocks on the child happens in one thread
per child.
"""

import asyncio
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Literal

from headbank.errors import EngineError, EngineOverloaded, EngineUnavailable, HeadRankError
from headbank.types import Ranking
from service.child import run
from service.engine import CacheCounts, DeviceLost, EngineInfo, Job, LoadEngine, Reply
from service.errors import DeadlineExceeded
from service.loading import load_engine
from service.queue import Pending, Queue, estimated_tokens
from service.settings import Settings

_log = logging.getLogger("headrank.worker")

State = Literal["starting", "ready", "restarting", "failed", "stopped"]

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
"""Pause before a restart; doubles while restarts fail."""

_END_S = 5.0
"""Seconds a killed process gets to disappear."""

_NEWEST_SHARE = 0.2
"""Weight of the newest job in the running mean of their seconds, from which Retry-After is estimated."""

_OUT_OF_TURN = "the engine process answered out of turn"


class EngineGone(Exception):
    """The child process has ended or is stuck; the text says which."""


class _Child:
    """One child process and the thread that talks to it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrank-engine")
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self.gone = asyncio.Event()

    async def start(self, load: LoadEngine, settings: Settings) -> EngineInfo:
        """Start the process and wait until it has loaded. Raises what it failed with, or EngineGone."""
        loop = asyncio.get_running_loop()
        process, self._pipe = await loop.run_in_executor(self._thread, _spawn, load, settings)
        self._process = process
        loop.add_reader(process.sentinel, self._on_exit)
        answer = await self._exchange((), settings.start_timeout_s)
        if isinstance(answer, HeadRankError):
            raise answer
        if not isinstance(answer, EngineInfo):
            raise EngineGone(_OUT_OF_TURN)
        return answer

    async def ask(self, jobs: Sequence[Job], timeout_s: float) -> Reply:
        """Have a batch answered. Raises EngineGone."""
        answer = await self._exchange(jobs, timeout_s)
        if not isinstance(answer, Reply) or len(answer.results) != len(jobs):
            raise EngineGone(_OUT_OF_TURN)
        if not all(isinstance(result, Ranking | HeadRankError) for result in answer.results):
            raise EngineGone(_OUT_OF_TURN)
        return answer

    async def _exchange(self, jobs: Sequence[Job], timeout_s: float) -> object:
        assert self._pipe is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                return await loop.run_in_executor(self._thread, _exchange, self._pipe, jobs)
        except TimeoutError:
            raise EngineGone(f"the engine process gave no answer for {timeout_s:g} s") from None
        except (EOFError, OSError):
            raise EngineGone(await self.ended()) from None
        except Exception as error:
            raise EngineGone(f"the engine's answer cannot be read ({type(error).__name__})") from None

    def _on_exit(self) -> None:
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self.gone.set()

    async def ended(self) -> str:
        """Wait until the process is gone, and say how it went."""
        assert self._process is not None
        # The sentinel fires a moment before the exit code can be had, so it is no substitute for joining.
        await asyncio.to_thread(self._process.join, _END_S)
        return f"the engine process ended with exit code {self._process.exitcode}"

    async def end(self) -> None:
        """Kill the process if it still runs, and release its thread."""
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            await self.ended()
            self._pipe.close()
        self._thread.shutdown(wait=False)


def _spawn(load: LoadEngine, settings: Settings) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run,
        args=(theirs, load, settings.model_copy(update={"api_keys": ()})),
        name="headrank-engine",
        daemon=True,
    )
    process.start()
    theirs.close()
    return process, ours


def _exchange(pipe: Connection, jobs: Sequence[Job]) -> object:
    if jobs:
        pipe.send(jobs)
    return pipe.recv()


class Worker:
    """Keeps one engine running and gives it one batch after the other."""

    def __init__(self, settings: Settings, load: LoadEngine = load_engine) -> None:
        """`load` runs in the child process, so it must be importable there."""
        self._settings = settings
        self._load = load
        self._queue = Queue()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._job_s = 1.0
        self._busy = False
        self.info: EngineInfo | None = None
        self.state: State = "starting"
        self.reason = ""
        """Why the engine is not ready; empty while it is."""
        self.restarts = 0
        self.cache = CacheCounts()
        """Hits and misses of all engines so far, and what the present one holds."""
        self.on_batch: Callable[[int, int], None] | None = None
        """Called with the number of requests and the estimated tokens of every batch."""
        self.fatal: HeadRankError | None = None
        self.on_fatal: Callable[[], None] | None = None
        """Called when the first start has failed; `fatal` says why. No restart is tried then."""

    @property
    def waiting(self) -> int:
        """Requests in the queue, those being answered not counted."""
        return len(self._queue)

    async def start(self) -> None:
        """Begin to load the engine; returns at once."""
        self._task = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """End the engine; requests that still wait fail."""
        self._set_state("stopped", "the service is stopping")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for pending in self._queue.drain():
            _fail(pending, EngineUnavailable(self.reason))

    async def submit(self, job: Job) -> Ranking:
        """Have a job answered; `seconds` of the ranking gets `queue`. Cancel it to leave the queue.

        Raises EngineUnavailable while no engine is ready, EngineOverloaded when the queue is full,
        DeadlineExceeded, and the engine's own errors.
        """
        if self.state != "ready":
            raise EngineUnavailable(f"the engine is not ready ({self.state})")
        # An idle engine takes one more out of the queue as soon as it gets to run.
        if self.waiting >= self._settings.queue_requests + (not self._busy):
            raise EngineOverloaded("the queue is full", min(60.0, self._job_s * (self.waiting + 1)))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.request_timeout_s
        pending = Pending(job, loop.create_future(), loop.time(), deadline, estimated_tokens(job))
        # It writes for seconds, and shares no pass with anyone.
        pending.alone = job.method == "llm"
        self._queue.add(pending)
        self._wake.set()
        try:
            async with asyncio.timeout_at(deadline):
                return await pending.answer
        except TimeoutError:
            limit = self._settings.request_timeout_s
            raise DeadlineExceeded(f"no answer within {limit:g} s") from None
        finally:
            # Awaiting a future cancels it along, so the engine skips it; the place in the queue is free at
            # once.
            self._queue.discard(pending)

    def _set_state(self, state: State, reason: str = "") -> None:
        self.state, self.reason = state, reason

    async def _supervise(self) -> None:
        """Start an engine, feed it until it is gone, start the next."""
        pause = FIRST_BACKOFF_S
        while True:
            child = _Child()
            try:
                self.info = await child.start(self._load, self._settings)
                pause = FIRST_BACKOFF_S
                self._set_state("ready")
                _log.info("the engine is ready: model %s", self._settings.model_name)
                await self._feed(child)
            except Exception as error:
                # Whatever it was, requests must learn that there is no engine, and there must be one again.
                self._set_state("restarting", str(error))
                _log.error("%s: %s", type(error).__name__, error)
                if self.info is None:
                    self._give_up(error if isinstance(error, HeadRankError) else EngineError(str(error)))
                    return
            finally:
                await child.end()
            self.restarts += 1
            self.cache = CacheCounts(self.cache.hits, self.cache.misses)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_BACKOFF_S)

    def _give_up(self, error: HeadRankError) -> None:
        self.fatal = error
        self._set_state("failed", str(error))
        if self.on_fatal is not None:
            self.on_fatal()

    async def _feed(self, child: _Child) -> None:
        """Give the child one batch after the other. Raises EngineGone when it has ended."""
        loop = asyncio.get_running_loop()
        ended = self.cache
        while True:
            self._busy = False
            batch = await self._next(child)
            self._busy = True
            started = loop.time()
            if self.on_batch is not None:
                self.on_batch(len(batch), sum(pending.tokens for pending in batch))
            # A forward pass cannot be interrupted: it may overrun its deadline, by as much again before it
            # counts as stuck.
            patience_s = max(p.deadline for p in batch) - started + self._settings.request_timeout_s
            try:
                reply = await child.ask([pending.job for pending in batch], patience_s)
            except EngineGone:
                self._lost(batch, "the engine process ended while it worked on this request")
                raise
            except asyncio.CancelledError:
                for pending in batch:
                    _fail(pending, EngineUnavailable("the service is stopping"))
                raise
            self.cache = replace(
                reply.cache, hits=ended.hits + reply.cache.hits, misses=ended.misses + reply.cache.misses
            )
            self._job_s += _NEWEST_SHARE * ((loop.time() - started) / len(batch) - self._job_s)
            self._deliver(batch, reply, started)

    def _deliver(self, batch: Sequence[Pending], reply: Reply, started: float) -> None:
        """Give every request its result. Raises EngineGone when the device has failed."""
        lost = []
        for pending, result in zip(batch, reply.results, strict=True):
            if isinstance(result, DeviceLost):
                lost.append(pending)
            elif isinstance(result, HeadRankError):
                _fail(pending, result)
            elif not pending.answer.done():
                seconds = result.seconds | {"queue": started - pending.arrived}
                pending.answer.set_result(replace(result, seconds=seconds))
        if lost:
            self._lost(lost, "the device failed while it worked on this request")
            raise EngineGone("the device failed")

    def _lost(self, batch: Sequence[Pending], message: str) -> None:
        """An engine has ended over a batch: any of its requests may be why, so the next one gets them one by one."""
        if len(batch) == 1:
            _fail(batch[0], EngineUnavailable(message))
            return
        for pending in batch:
            pending.alone = True
        self._queue.put_back(batch)

    async def _next(self, child: _Child) -> list[Pending]:
        """The requests to answer next, at least one. Raises EngineGone when the child ends meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            batch = self._queue.take(self._settings.batch_tokens, loop.time())
            if batch:
                return batch
            self._wake.clear()
            wake = asyncio.create_task(self._wake.wait())
            gone = asyncio.create_task(child.gone.wait())
            try:
                await asyncio.wait((wake, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                wake.cancel()
                gone.cancel()
            if child.gone.is_set():
                raise EngineGone(await child.ended())


def _fail(pending: Pending, error: HeadRankError) -> None:
    if not pending.answer.done():
        pending.answer.set_exception(error)
