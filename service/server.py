"""The application in a server of its own, as `headrank serve` runs it."""

import logging
import math

import uvicorn

from headbank.errors import EngineError
from service.app import create_app
from service.child import LOG_FORMAT
from service.engine import LoadEngine
from service.loading import load_engine
from service.settings import Settings
from service.worker import Worker

_log = logging.getLogger("headrank.server")

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(settings: Settings, load: LoadEngine = load_engine) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests finish.

    Raises the HeadRankError with which the first start of the engine failed, and EngineError when the server
    itself cannot start (the port is taken).
    """
    logging.basicConfig(level=settings.log_level.upper(), format=LOG_FORMAT)
    if not settings.api_keys and settings.host not in LOOPBACK:
        _log.warning("no api_keys are set: whoever reaches port %d may use the service", settings.port)
    worker = Worker(settings, load)
    config = uvicorn.Config(
        create_app(settings, worker),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        timeout_graceful_shutdown=math.ceil(settings.request_timeout_s),
        server_header=False,
    )
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True

    worker.on_fatal = stop
    server.run()
    if worker.fatal is not None:
        raise worker.fatal
    if not server.started:
        raise EngineError(f"cannot listen on {settings.host} port {settings.port}")
