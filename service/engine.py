"""The engine that answers batches of jobs, and what travels between it and the parent process.

Importing this loads no model library: the parent process does without.
"""

import logging
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from headbank.errors import EngineUnavailable, HeadRankError, NonFiniteScore
from headbank.rerankers.base import Reranker, Task
from headbank.types import HeadSet, ModelInfo, Ranking, RankOptions, View
from service.errors import InternalError
from service.settings import Method, Settings

_log = logging.getLogger("headrank.engine")

Result = Ranking | HeadRankError


@dataclass(frozen=True)
class Job:
    """One ranking, as it travels to the engine."""

    request_id: str
    method: Method
    query: str
    documents: tuple[str, ...]
    options: RankOptions


@dataclass(frozen=True)
class CacheCounts:
    """What the cache of documents did and holds."""

    hits: int = 0
    misses: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    documents: int = 0


@dataclass(frozen=True)
class Reply:
    """The engine's answer to a batch."""

    results: tuple[Result, ...]
    """One per job, in their order."""
    cache: CacheCounts
    """Since the engine was loaded."""


@dataclass(frozen=True)
class EngineInfo:
    """What the engine has loaded."""

    model: ModelInfo
    device: str
    """`cpu` or `gpu`."""
    head_sets: tuple[HeadSet, ...]
    """The sets that requests can choose: of every view in every layout there is, a view's default first."""
    defaults: dict[View, str]
    """Name of the set that votes where a request names no layout."""
    methods: tuple[Method, ...]
    """What requests can choose; `dense` may still lack its model, which is loaded at its first use."""


class DeviceLost(EngineUnavailable):
    """The accelerator failed under a batch; the engine process ends after saying so."""


class Engine(Protocol):
    """Answers jobs, one batch at a time."""

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        ...

    @property
    def cache(self) -> CacheCounts:
        """What the cache of documents did so far."""
        ...

    def rank_many(self, jobs: Sequence[Job]) -> list[Result]:
        """One result per job, in their order; what a caller should know is returned, anything else may be raised."""
        ...


LoadEngine = Callable[[Settings], Engine]


@runtime_checkable
class SharingReranker(Reranker, Protocol):
    """A reranker whose tasks share passes."""

    def rank_many(self, tasks: Sequence[Task]) -> list[Result]:
        """One result per task, in their order."""
        ...


class RerankEngine:
    """Groups the jobs of a batch that can share passes, and keeps what fails from the others."""

    def __init__(
        self,
        info: EngineInfo,
        choose: Callable[[Job], Reranker],
        cache: Callable[[], CacheCounts] = CacheCounts,
    ) -> None:
        """`choose` gives the reranker of a job, or raises the HeadRankError that says why there is none."""
        self.info = info
        self._choose = choose
        self._cache = cache

    @property
    def cache(self) -> CacheCounts:
        """What the cache of documents did so far."""
        return self._cache()

    def rank_many(self, jobs: Sequence[Job]) -> list[Result]:
        """Rank by every job's method (see `Engine.rank_many`).

        A group that fails as a whole is tried again job by job. When the device fails, all that is not yet ranked
        gets DeviceLost.
        """
        results: list[Result | None] = [None] * len(jobs)
        groups: dict[object, tuple[Reranker, list[int]]] = {}
        for i, job in enumerate(jobs):
            try:
                reranker = self._choose(job)
            except HeadRankError as error:
                results[i] = error
                continue
            # Views apart: a response needs every layer, and the query view would have to pass them as well.
            key = (id(reranker), job.options.view) if isinstance(reranker, SharingReranker) else i
            groups.setdefault(key, (reranker, []))[1].append(i)
        lost: DeviceLost | None = None
        for reranker, members in groups.values():
            if lost is None:
                found = isolated(partial(_rank, reranker), [jobs[i] for i in members])
            else:
                found = [lost] * len(members)
            for i, result in zip(members, found, strict=True):
                results[i] = result
                lost = result if isinstance(result, DeviceLost) else lost
        return [result for result in results if result is not None]


def _rank(reranker: Reranker, jobs: Sequence[Job]) -> list[Result]:
    """Rank jobs by one reranker; only one that shares passes gets several."""
    tasks = [Task(job.query, job.documents, job.options) for job in jobs]
    if isinstance(reranker, SharingReranker):
        return [_checked(result) for result in reranker.rank_many(tasks)]
    return [_checked(reranker.rank(task.query, task.documents, task.options)) for task in tasks]


def _checked(result: Result) -> Result:
    if isinstance(result, Ranking) and not all(map(math.isfinite, result.scores + (result.raw_scores or ()))):
        return NonFiniteScore("a document's score is not a finite number")
    return result


def isolated(rank: Callable[[Sequence[Job]], list[Result]], jobs: Sequence[Job]) -> list[Result]:
    """Rank jobs together; if that raises, each alone, so that only those that fail alone get an error.

    An unforeseen error becomes an InternalError that carries only the id, one of the device DeviceLost for all that
    is not yet ranked.
    """
    failed = _attempt(rank, jobs)
    if isinstance(failed, list):
        return failed
    if len(jobs) == 1 or isinstance(failed, DeviceLost):
        return [failed] * len(jobs)
    # Not inside a handler of the error, whose traceback would hold the memory of the pass that failed.
    results: list[Result] = []
    for job in jobs:
        lost = results[-1] if results and isinstance(results[-1], DeviceLost) else None
        results += [lost] if lost else isolated(rank, [job])
    return results


def _attempt(
    rank: Callable[[Sequence[Job]], list[Result]], jobs: Sequence[Job]
) -> list[Result] | HeadRankError:
    """The results, or the error for them all."""
    try:
        return rank(jobs)
    except HeadRankError as error:
        return error.with_traceback(None)
    except Exception as error:
        ids = ", ".join(job.request_id for job in jobs)
        log_failure(_log, ids, error)
        if type(error).__name__ == "AcceleratorError":
            # After such an error a GPU process can compute nothing more; the parent starts another.
            return DeviceLost(f"the device failed, request {ids}")
        return InternalError(f"internal error, request {ids}")


def log_failure(log: logging.Logger, request_id: str, error: Exception) -> None:
    """Log where an exception was raised; not its message, which may repeat a caller's text."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    log.error("request %s: %s at %s", request_id, type(error).__name__, places)
