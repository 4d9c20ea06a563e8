"""The FastAPI application."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

import headbank
from headbank.errors import HeadRankError
from service.errors import UnknownRoute, UnknownVerb, cohere_body, failure
from service.metrics import Metrics
from service.routes import about, probes
from service.routes.rerank import rerank_routes
from service.settings import Settings
from service.state import State
from service.worker import Worker

DESCRIPTION = (
    "Reranks documents by the attention heads of an open language model, with no training. Speaks the "
    "dialects of Cohere's (v1 and v2), Jina's, vLLM's and Text Embeddings Inference's clients."
)


def create_app(settings: Settings, worker: Worker | None = None) -> FastAPI:
    """The service as an ASGI application; its lifespan starts and ends the engine.

    `worker` stands in for the engine in tests.
    """
    engine = worker or Worker(settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.stop()

    app = FastAPI(title="HeadRank", version=headbank.__version__, description=DESCRIPTION, lifespan=lifespan)
    app.state.headrank = State(settings, engine, Metrics(engine))
    app.include_router(rerank_routes(app.state.headrank))
    app.include_router(about.router)
    app.include_router(probes.router)
    app.add_exception_handler(HeadRankError, _typed_error)
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _typed_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HeadRankError)
    failed = failure(error, uuid.uuid4().hex)
    return JSONResponse(cohere_body(failed), failed.kind.status, failed.headers)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    typed = (
        UnknownVerb("the path does not take this method")
        if error.status_code == 405
        else UnknownRoute("no such path")
    )
    response = await _typed_error(request, typed)
    response.headers.update(error.headers or {})
    return response
