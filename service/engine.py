"""What lives in the child process: model, bank and rerankers. Importing this loads no model library."""

import contextlib
import logging
import math
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

from headbank.errors import (
    BankError,
    EngineError,
    EngineUnavailable,
    HeadRankError,
    InputError,
    ModelError,
    NonFiniteScore,
)
from headbank.rerankers.base import Reranker
from headbank.types import VIEWS, HeadSet, ModelInfo, Ranking, RankOptions
from service.errors import InternalError
from service.settings import Method, Settings

if TYPE_CHECKING:
    from headbank.rerankers.heads import HeadReranker

_log = logging.getLogger("headrank.engine")

DENSE_RETRY_S = 60.0
"""After a failed load of the dense model, requests for it fail at once for so long: loading blocks others."""

_EXAMPLE_QUERY = "What is the capital of France?"
_EXAMPLE_DOCUMENTS = (
    "Berlin is a large city in Germany.",
    "The capital of France is Paris.",
    "Bananas grow in warm countries.",
)
_EXAMPLE_ANSWER = 1

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True)
class Job:
    """One ranking, as it travels to the engine."""

    request_id: str
    method: Method
    query: str
    documents: tuple[str, ...]
    options: RankOptions


@dataclass(frozen=True)
class EngineInfo:
    """What the engine has loaded."""

    model: ModelInfo
    layout: str
    device: str
    """`cpu` or `gpu`."""
    head_sets: tuple[HeadSet, ...]
    """The sets that vote, at most one per view."""


class DeviceLost(EngineUnavailable):
    """The accelerator failed under a request; the engine process ends after saying so."""


class Engine(Protocol):
    """Answers jobs, one at a time."""

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        ...

    def rank(self, job: Job) -> Ranking:
        """Rank. Raises HeadRankError for what the caller should know; any other exception stays here."""
        ...


LoadEngine = Callable[[Settings], Engine]


class RerankEngine:
    """The engine of the service: heads, and the baselines next to them."""

    def __init__(
        self, info: EngineInfo, rerankers: dict[Method, Reranker], load_dense: Callable[[], Reranker]
    ) -> None:
        self.info = info
        self._rerankers = rerankers
        self._load_dense = load_dense
        self._dense_failure: tuple[float, ModelError] | None = None

    def rank(self, job: Job) -> Ranking:
        """Rank by the job's method."""
        if job.method == "heads" and all(s.view != job.options.view for s in self.info.head_sets):
            raise InputError("view", "the head bank has no heads for this view")
        ranking = self._reranker(job.method).rank(job.query, job.documents, job.options)
        if not all(map(math.isfinite, ranking.scores)):
            raise NonFiniteScore("a document's score is not a finite number")
        return ranking

    def _reranker(self, method: Method) -> Reranker:
        if method == "dense" and method not in self._rerankers:
            self._rerankers[method] = self._dense()
        return self._rerankers[method]

    def _dense(self) -> Reranker:
        if self._dense_failure is not None:
            failed_at, error = self._dense_failure
            if time.monotonic() - failed_at < DENSE_RETRY_S:
                raise error
        try:
            return self._load_dense()
        except ModelError as error:
            self._dense_failure = (time.monotonic(), error)
            raise


def load_engine(settings: Settings) -> Engine:
    """Load the model and its bank. Raises ModelError, BankError, and InputError for a setting."""
    from headbank.models.base import HeadRunner
    from headbank.models.fake import FAKE_MODEL, FakeRunner
    from headbank.rerankers.bm25 import BM25
    from headbank.rerankers.heads import HeadReranker, open_bank

    runner: HeadRunner
    if settings.model == FAKE_MODEL:
        # Not by way of `headbank.models.loading`, which spends seconds on importing the library of real
        # models.
        runner, device = FakeRunner(), "cpu"
    else:
        from headbank.models.loading import default_device, load_runner

        runner = load_runner(
            settings.model, dtype=settings.dtype, device=settings.device, threads=settings.threads
        )
        device = default_device() if settings.device == "auto" else settings.device
    bank = open_bank(settings.bank, runner.info)
    heads = HeadReranker(runner, bank, response_tokens=settings.response_tokens)
    info = EngineInfo(
        model=runner.info,
        layout=bank.layout,
        device="cpu" if device == "cpu" else "gpu",
        head_sets=_voting_sets(heads, settings),
    )
    engine = RerankEngine(info, {"heads": heads, "bm25": BM25()}, lambda: _load_dense(settings))
    if settings.warm_up:
        _warm_up(engine)
    return engine


def _voting_sets(heads: "HeadReranker", settings: Settings) -> tuple[HeadSet, ...]:
    """One set per view that the bank has heads for. Raises BankError when the default view has none."""
    sets = {settings.default_view: heads.head_set(settings.default_view)}
    for view in VIEWS:
        with contextlib.suppress(BankError):
            sets[view] = heads.head_set(view)
    return tuple(sets[view] for view in VIEWS if view in sets)


def _load_dense(settings: Settings) -> Reranker:
    from headbank.rerankers.dense import Dense

    # A download would keep every other request waiting.
    return Dense(
        settings.dense_model,
        device=None if settings.device == "auto" else settings.device,
        local_files_only=True,
    )


def _warm_up(engine: RerankEngine) -> None:
    """Rank an example with a known answer: what loads late is loaded, and a broken setup shows."""
    for heads in engine.info.head_sets:
        options = RankOptions(view=heads.view)
        ranking = engine.rank(Job("warm-up", "heads", _EXAMPLE_QUERY, _EXAMPLE_DOCUMENTS, options))
        if ranking.order[0] != _EXAMPLE_ANSWER:
            _log.warning(
                "view %s ranks document %d of the warm-up example first, not %d: do model and bank fit?",
                heads.view,
                ranking.order[0],
                _EXAMPLE_ANSWER,
            )


def run(connection: Connection, load: LoadEngine, settings: Settings) -> None:
    """The child process: load, tell the parent, answer jobs one by one until the parent closes the pipe.

    Sends an EngineInfo or a HeadRankError first, then a Ranking or a HeadRankError for every job.
    """
    # Ctrl-C reaches the whole group of processes; the parent lets requests finish and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=settings.log_level.upper(), format=LOG_FORMAT)
    try:
        engine = load(settings)
    except HeadRankError as error:
        connection.send(error)
        return
    except Exception as error:
        # No request is in sight, so the text of the error cannot be a caller's.
        _log.exception("the engine failed to start")
        connection.send(EngineError(f"the engine failed to start: {type(error).__name__}: {error}"))
        return
    busy = False
    ending = False

    def on_sigterm(_signal: int, _frame: object) -> None:
        # A supervisor may signal every process of the service; the request in work is still answered.
        nonlocal ending
        ending = True
        if not busy:
            raise SystemExit

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        connection.send(engine.info)
        while not ending:
            job = connection.recv()
            busy = True
            reply = answer(engine, job)
            connection.send(reply)
            busy = False
            if isinstance(reply, DeviceLost):
                return
    except (EOFError, BrokenPipeError):
        return


def answer(engine: Engine, job: Job) -> Ranking | HeadRankError:
    """Rank, errors as values; an unforeseen one becomes an InternalError that carries only the id."""
    try:
        return engine.rank(job)
    except HeadRankError as error:
        return error
    except Exception as error:
        log_failure(_log, job.request_id, error)
        if type(error).__name__ == "AcceleratorError":
            # After such an error a GPU process can compute nothing more; the parent starts another.
            return DeviceLost(f"the device failed, request {job.request_id}")
        return InternalError(f"internal error, request {job.request_id}")


def log_failure(log: logging.Logger, request_id: str, error: Exception) -> None:
    """Log where an exception was raised; not its message, which may repeat a caller's text."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    log.error("request %s: %s at %s", request_id, type(error).__name__, places)
