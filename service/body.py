"""The one place where the bytes of a request become JSON."""

import json
import re
from typing import Any, NoReturn

from starlette.requests import Request

from headbank.errors import InputError, InputTooLong
from service.errors import InvalidBody, UnsupportedContentType

MAX_VALUES = 50_000
"""Most commas and opening brackets outside strings: parsing millions of values would stop the event loop."""

MAX_DEPTH = 32
"""Deepest nesting of a value that is sent back."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object; numbers are finite and strings encode to UTF-8.

    Raises UnsupportedContentType, InputTooLong, InvalidBody, and InputError for a number out of range.
    """
    _check_content_type(request.headers.get("content-type", ""))
    return parse_object(await _read(request, max_bytes))


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object; lone surrogates become U+FFFD. Raises as `read_object` does."""
    _check_values(raw)
    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_number, parse_float=_finite)
        if _SURROGATE_ESCAPE.search(raw):
            value = _without_surrogates(value)
    except UnicodeDecodeError:
        raise InvalidBody("body", "must be encoded in UTF-8") from None
    except RecursionError:
        raise InvalidBody("body", "is nested too deeply") from None
    except ValueError as error:
        where = (
            f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        )
        raise InvalidBody("body", f"is not valid JSON{where}") from None
    if not isinstance(value, dict):
        raise InvalidBody("body", "must be a JSON object")
    return value


def depth_within(value: object, limit: int) -> bool:
    """Whether lists and objects are nested at most `limit` deep."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not children or (limit > 0 and all(depth_within(child, limit - 1) for child in children))


async def _read(request: Request, max_bytes: int) -> bytes:
    """All bytes, kept only up to the limit.

    A body somewhat over it is read to its end before the refusal: many clients read no answer before they
    have sent all.
    """
    parts: list[bytes] = []
    received = 0
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > 4 * max_bytes:
        raise _too_large(max_bytes)
    async for chunk in request.stream():
        received += len(chunk)
        if received <= max_bytes:
            parts.append(chunk)
        elif received > 4 * max_bytes:
            break
    if received > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(parts)


def _too_large(max_bytes: int) -> InputTooLong:
    return InputTooLong("body", f"must not be larger than {max_bytes} bytes", max_bytes)


def _check_content_type(header: str) -> None:
    kind, *parameters = (part.strip().lower() for part in header.split(";"))
    charsets = [p.removeprefix("charset=").strip('"') for p in parameters if p.startswith("charset=")]
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedContentType("content-type", "must be application/json")
    if any(charset not in ("utf-8", "utf8", "us-ascii") for charset in charsets):
        raise UnsupportedContentType("content-type", "must be application/json in UTF-8")


def _check_values(raw: bytes) -> None:
    if sum(map(raw.count, (b",", b"[", b"{"))) <= MAX_VALUES:
        return
    structure = _STRING.sub(b"", raw)
    if sum(map(structure.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise InputTooLong("body", f"must not hold more than {MAX_VALUES} values", MAX_VALUES)


def _finite(literal: str) -> float:
    number = float(literal)
    if number in (float("inf"), float("-inf")):
        _refuse_number(literal)
    return number


def _refuse_number(_literal: str) -> NoReturn:
    raise InputError("body", "holds a number that is not finite")


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value
