"""`POST /v2/rerank`, `/v1/rerank` and `/rerank`: one handler, the dialect chosen by path and body."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi.security import HTTPBearer
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from headbank.errors import HeadRankError
from service.auth import check_key
from service.body import read_object
from service.dialects import Cohere, Dialect, Outcome, Reply, Tei
from service.engine import Job, log_failure
from service.errors import InternalError, failure, undecided_body
from service.schemas import (
    ErrorResponse,
    RerankRequest,
    RerankResponse,
    TeiErrorResponse,
    TeiRank,
    TeiRequest,
)
from service.state import State, state_of

_log = logging.getLogger("headrank.rerank")

CLIENT_GONE = 499
"""Status of a request whose client left; seen in logs only."""

Answer = TypeVar("Answer")

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class _Path:
    dialects: tuple[str, ...]
    """Names, the first that accepts a body gets it."""
    summary: str
    requests: tuple[type[RerankRequest] | type[TeiRequest], ...]
    answer: Any
    error: Any


PATHS = {
    "/v2/rerank": _Path(("cohere_v2",), "Rerank, Cohere v2", (RerankRequest,), RerankResponse, ErrorResponse),
    "/v1/rerank": _Path(
        ("cohere_v1",), "Rerank, Cohere v1, Jina, vLLM", (RerankRequest,), RerankResponse, ErrorResponse
    ),
    "/rerank": _Path(
        ("tei", "cohere_v1"),
        "Rerank; a body with `texts` is answered as Text Embeddings Inference does, any other as /v1/rerank",
        (TeiRequest, RerankRequest),
        list[TeiRank] | RerankResponse,
        TeiErrorResponse | ErrorResponse,
    ),
}

_ERRORS = {
    400: "Not JSON, or nothing to rank",
    401: "API key missing or wrong",
    404: "Model not served (strict services only)",
    413: "Body, query or documents over a limit",
    415: "Body not declared as JSON",
    422: "A field has a wrong value",
    429: "Queue full; see Retry-After",
    500: "Internal error; the log has the id",
    503: "Engine not ready; see Retry-After",
    504: "Not answered in time",
}


def rerank_routes(state: State) -> APIRouter:
    """The router of all dialects."""
    dialects: dict[str, Dialect] = {
        dialect.name: dialect
        for dialect in (
            Tei(state.settings, lambda: state.compute_type),
            Cohere(state.settings, "1"),
            Cohere(state.settings, "2"),
        )
    }
    router = APIRouter(tags=["rerank"], dependencies=[Depends(HTTPBearer(auto_error=False))])
    for path, about in PATHS.items():
        router.add_api_route(
            path,
            _handler([dialects[name] for name in about.dialects]),
            methods=["POST"],
            name="rerank",
            operation_id="rerank" + path.replace("/", "_"),
            summary=about.summary,
            response_model=None,
            responses={
                200: {"model": about.answer, "description": "The ranking, best first"},
                **{status: {"model": about.error, "description": text} for status, text in _ERRORS.items()},
            },
            openapi_extra={"requestBody": _request_body(about)},
        )
    return router


def _request_body(about: _Path) -> dict[str, Any]:
    schemas = [request.model_json_schema() for request in about.requests]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _handler(dialects: Sequence[Dialect]) -> Handler:
    async def rerank(request: Request) -> Response:
        """Rank documents by their relevance to a query."""
        state = state_of(request)
        request_id = uuid.uuid4().hex
        started = time.perf_counter()
        dialect = dialects[0] if len(dialects) == 1 else None
        try:
            check_key(request, state.settings.api_keys)
            body = await read_object(request, state.settings.max_body_bytes)
            dialect = next(d for d in dialects if d.accepts(body))
            reply = await _answer(request, state, dialect, body, request_id, started)
            response: Response = JSONResponse(
                reply.body, headers=reply.headers | {"x-request-id": request_id}
            )
        except ClientDisconnect:
            state.metrics.disconnected()
            response = Response(status_code=CLIENT_GONE)
        except Exception as error:
            response = _error_response(state, dialect, error, request_id)
        name = dialect.name if dialect else "undecided"
        state.metrics.answered(name, response.status_code, time.perf_counter() - started)
        return response

    return rerank


async def _answer(
    request: Request, state: State, dialect: Dialect, body: dict[str, Any], request_id: str, started: float
) -> Reply:
    call = dialect.parse(body)
    job = Job(request_id, call.method, call.query, call.documents, call.options)
    ranking = await _while_connected(request, state.worker.submit(job))
    state.metrics.ranked(call, ranking)
    return dialect.render(call, Outcome(ranking, request_id, time.perf_counter() - started))


async def _while_connected(request: Request, work: Awaitable[Answer]) -> Answer:
    """Await `work`, cancel it when the client leaves. Raises ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnect(request: Request) -> None:
    # The body has been read, so the next message can only be the end of the connection.
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error_response(state: State, dialect: Dialect | None, error: Exception, request_id: str) -> Response:
    if not isinstance(error, HeadRankError):
        log_failure(_log, request_id, error)
        error = InternalError(f"internal error, request {request_id}")
    state.metrics.failed(error)
    failed = failure(error, request_id)
    body = undecided_body(failed) if dialect is None else dialect.render_error(failed)
    return JSONResponse(body, status_code=failed.kind.status, headers=failed.headers)
