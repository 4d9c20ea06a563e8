"""From an error to an HTTP status and a body: one table, and the two shapes that rerank clients read."""

from dataclasses import dataclass
from typing import Any

from headbank.errors import (
    BankError,
    EngineError,
    EngineOverloaded,
    EngineUnavailable,
    HeadRankError,
    InputError,
    InputTooLong,
    ModelError,
)


class InvalidBody(InputError):
    """The body is not JSON in UTF-8, or not an object."""


class EmptyInput(InputError):
    """The query or the list of documents is empty."""


class UnsupportedContentType(InputError):
    """The body is not declared as JSON."""


class UnknownModel(InputError):
    """The request names a model that is not served here."""


class UnknownRoute(HeadRankError):
    """There is nothing at this path."""


class UnknownVerb(HeadRankError):
    """The path does not take this HTTP method."""


class Unauthorized(HeadRankError):
    """The API key is missing or wrong."""


class DeadlineExceeded(EngineError):
    """The answer was not ready in time."""


class InternalError(EngineError):
    """Something failed that should not have; the log has the place, under the id of the request."""


@dataclass(frozen=True)
class ErrorKind:
    """How a class of errors is answered."""

    status: int
    type: str
    """`error.type` of the Cohere body."""
    tei_type: str
    """`error_type` of the TEI body."""


_INTERNAL = ErrorKind(500, "internal_error", "Backend")

ERROR_KINDS: dict[type[HeadRankError], ErrorKind] = {
    InvalidBody: ErrorKind(400, "invalid_request_error", "Validation"),
    EmptyInput: ErrorKind(400, "invalid_request_error", "Empty"),
    Unauthorized: ErrorKind(401, "authentication_error", "Unauthorized"),
    UnknownModel: ErrorKind(404, "not_found_error", "Validation"),
    UnknownRoute: ErrorKind(404, "not_found_error", "Validation"),
    UnknownVerb: ErrorKind(405, "invalid_request_error", "Validation"),
    InputTooLong: ErrorKind(413, "request_too_large", "Validation"),
    UnsupportedContentType: ErrorKind(415, "invalid_request_error", "Validation"),
    InputError: ErrorKind(422, "validation_error", "Validation"),
    EngineOverloaded: ErrorKind(429, "overloaded_error", "Overloaded"),
    InternalError: _INTERNAL,
    EngineUnavailable: ErrorKind(503, "unavailable_error", "Unhealthy"),
    ModelError: ErrorKind(503, "unavailable_error", "Backend"),
    BankError: ErrorKind(503, "unavailable_error", "Backend"),
    DeadlineExceeded: ErrorKind(504, "timeout_error", "Backend"),
    EngineError: _INTERNAL,
    HeadRankError: _INTERNAL,
}
"""The most specific class that an error is an instance of decides."""

_UNAVAILABLE_RETRY_S = 2


@dataclass(frozen=True)
class Failure:
    """An error on its way to a client."""

    request_id: str
    kind: ErrorKind
    message: str
    param: str | None
    headers: dict[str, str]


def failure(error: HeadRankError, request_id: str) -> Failure:
    """Look an error up in the table."""
    kind = next(ERROR_KINDS[cls] for cls in type(error).__mro__ if cls in ERROR_KINDS)
    headers = {"x-request-id": request_id}
    if isinstance(error, EngineOverloaded):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif kind.status == 503:
        headers["retry-after"] = str(_UNAVAILABLE_RETRY_S)
    elif kind.status == 401:
        headers["www-authenticate"] = "Bearer"
    param = error.field if isinstance(error, InputError) else None
    return Failure(request_id, kind, str(error), param, headers)


def cohere_body(failed: Failure) -> dict[str, Any]:
    """What Cohere's, Jina's, Voyage's and OpenAI's readers of errors look for, in one body."""
    detail = {
        "message": failed.message,
        "type": failed.kind.type,
        "param": failed.param,
        "code": failed.kind.status,
    }
    return {"id": failed.request_id, "message": failed.message, "detail": failed.message, "error": detail}


def tei_body(failed: Failure) -> dict[str, Any]:
    """Text Embeddings Inference's error."""
    return {"error": failed.message, "error_type": failed.kind.tei_type}


def undecided_body(failed: Failure) -> dict[str, Any]:
    """For a path of several dialects, when the request failed before its own was known."""
    return tei_body(failed) | {"id": failed.request_id, "message": failed.message, "detail": failed.message}
