import asyncio
import contextlib
import json
import threading
import time

import httpx
import pytest
import uvicorn

from headbank.errors import HeadRankError
from service.app import create_app
from service.engine import isolated
from service.loading import load_engine
from service.settings import Settings
from service.worker import Worker
from tests.service.engines import ScriptedEngine, load_scripted


class InlineWorker(Worker):
    """Answers in this process at once: for tests of the wire, which need no child."""

    def __init__(self, settings, engine):
        super().__init__(settings)
        self._engine = engine
        self.info = engine.info
        self.state = "ready"
        self.jobs = []

    async def start(self):
        pass

    async def submit(self, job):
        self.jobs.append(job)
        [result] = isolated(self._engine.rank_many, [job])
        if isinstance(result, HeadRankError):
            raise result
        return result


class Wire:
    """Requests to an app in this process."""

    def __init__(self, app, worker):
        self.app = app
        self.worker = worker

    def request(self, method, path, **options):
        async def send():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def post(self, path, body, **headers):
        """POST a JSON value, or bytes as they are."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        return self.request("POST", path, content=raw, headers=sent)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in Settings.model_fields:
        monkeypatch.delenv(f"HEADRANK_{name.upper()}", raising=False)


@pytest.fixture(scope="session")
def fake_engine():
    return load_engine(Settings(model="fake"))


@pytest.fixture(scope="session")
def _apps():
    return {}


@pytest.fixture
def wire(fake_engine, _apps):
    """Makes the app over the fake engine, or another one, with the given settings.

    Apps over the fake engine are kept, since building one takes most of a test's time; metrics count on.
    """

    def make(engine=None, **options):
        settings = Settings(**{"model": "fake", **options})
        key = (id(engine), settings.model_dump_json())
        if key not in _apps or engine is not None:
            worker = InlineWorker(settings, engine or fake_engine)
            _apps[key] = Wire(create_app(settings, worker), worker)
        _apps[key].worker.jobs.clear()
        return _apps[key]

    return make


@pytest.fixture
def scripted(wire):
    return wire(ScriptedEngine())


class Live:
    """A real server on a loopback port."""

    def __init__(self, url, worker):
        self.url = url
        self.worker = worker

    def wait(self, state, seconds=60.0):
        end = time.monotonic() + seconds
        while self.worker.state != state:
            assert time.monotonic() < end, f"still {self.worker.state}: {self.worker.reason}"
            time.sleep(0.02)


@contextlib.contextmanager
def live_server(settings, load=load_scripted):
    worker = Worker(settings, load)
    config = uvicorn.Config(create_app(settings, worker), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        live = Live(f"http://127.0.0.1:{port}", worker)
        live.wait("ready")
        yield live
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
