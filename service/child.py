"""The engine process: load, tell the parent, answer batches."""

import logging
import signal
from multiprocessing.connection import Connection

from headbank.errors import EngineError, HeadRankError
from service.engine import DeviceLost, LoadEngine, Reply, isolated
from service.settings import Settings

_log = logging.getLogger("headrank.engine")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run(connection: Connection, load: LoadEngine, settings: Settings) -> None:
    """Load an engine and answer batch after batch until the parent closes the pipe.

    Sends an EngineInfo or a HeadRankError first, then a Reply for every sequence of jobs.
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
        # A supervisor may signal every process of the service; the batch in work is still answered.
        nonlocal ending
        ending = True
        if not busy:
            raise SystemExit

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        connection.send(engine.info)
        while not ending:
            jobs = connection.recv()
            busy = True
            results = isolated(engine.rank_many, jobs)
            connection.send(Reply(tuple(results), engine.cache))
            busy = False
            if any(isinstance(result, DeviceLost) for result in results):
                return
    except (EOFError, BrokenPipeError):
        return
