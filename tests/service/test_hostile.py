"""Bodies nobody should send: none gives a 5xx, none comes back in the answer, none stops the service."""

import time

import pytest

from headbank.errors import (
    BankError,
    BankMismatch,
    DataError,
    EngineError,
    EngineOverloaded,
    EngineUnavailable,
    HeadRankError,
    InputError,
    InputTooLong,
    ModelError,
    NonFiniteScore,
    UnsupportedModel,
)
from service.body import MAX_VALUES, parse_object
from service.errors import (
    DeadlineExceeded,
    EmptyInput,
    InternalError,
    InvalidBody,
    Unauthorized,
    UnknownModel,
    UnsupportedContentType,
    cohere_body,
    failure,
    tei_body,
)

PATHS = ["/v2/rerank", "/v1/rerank", "/rerank"]
GOOD = b'{"query": "capital of France", "documents": ["a", "The capital of France"]}'


def nested(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b" ", 400),
        (b"{", 400),
        (b"nonsense SECRET", 400),
        (b'{"query": "SECRET', 400),
        (b"[1]", 400),
        (b'"SECRET"', 400),
        (b"null", 400),
        (b"\xff\xfe{", 400),
        (b'{"query": "\xed\xa0\x80SECRET", "documents": ["a"]}', 400),
        ('{"query": "SECRET", "documents": ["a"]}'.encode("utf-16"), 400),
        (b"{'query': 'SECRET'}", 400),
        (b'{"query": "a\nSECRET", "documents": ["a"]}', 400),
        (GOOD + GOOD, 400),
        (b'{"query": "q", "documents": ["a"], "top_n": ' + b"9" * 5000 + b"}", 400),
        (nested(100_000), 413),
        (b'{"query": "q", "documents": ["a"], "x": ' + nested(3000) + b"}", 400),
        (b'{"query": "q", "documents": [' + nested(900) + b"]}", 422),
        (b'{"query": "q", "documents": [{"text": "a", "x": ' + nested(900) + b"}]}", 422),
        (b'{"query": "q", "documents": [' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"]}", 422),
        (b'{"query": "q", "documents": ["a"], "top_n": NaN}', 422),
        (b'{"query": "q", "documents": ["a"], "top_n": Infinity}', 422),
        (b'{"query": "q", "documents": ["a"], "top_n": -Infinity}', 422),
        (b'{"query": "q", "documents": ["a"], "top_n": 1e400}', 422),
        (b'{"query": "q", "documents": [{"text": "a", "price": NaN}], "return_documents": true}', 422),
        (b'{"query": "q", "documents": [{"text": "a", "price": -1e999}], "return_documents": true}', 422),
        (b'{"query": "q", "documents": ["a"], "top_n": "NaN"}', 422),
        (b'{"query": "q", "documents": ["a"], "method": "\\ud800SECRET"}', 422),
        (b'{"query": "q", "documents": ["a"], "top_n": "SECRET\\udfff"}', 422),
        (b'{"query": "q", "documents": [' + b"[]," * MAX_VALUES + b"1]}", 413),
        (b'{"query": "q", "documents": [' + b'"",' * 2000 + b'""]}', 413),
        (b"\xef\xbb\xbf" + GOOD, 200),
        (GOOD.replace(b"capital", b"\\ud83d"), 200),
        (b"\r\n\t " + GOOD + b" \n", 200),
        (b'{"query": "old", "query": "capital of France", "documents": ["a"]}', 200),
        (b'{"query": "q\\u0000\\u202e", "documents": ["\\u0000", "", " ", "\xf0\x9f\x98\x80"]}', 200),
        (b'{"query": "???", "documents": ["!!!"]}', 200),
        (b'{"query": "q", "documents": ["' + b",[{" * MAX_VALUES + b'"]}', 200),
        (b'{"query": "q", "documents": ["' + b'\\"[,' * MAX_VALUES + b'"]}', 200),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_bodies(wire, path, raw, status):
    app = wire(max_tokens_per_doc=50)
    response = app.post(path, raw)
    assert response.status_code == status, response.text[:500]
    assert "SECRET" not in response.text
    if status != 200:
        assert len(response.text) < 1500
        assert response.json()["message"] == response.json()["detail"]
    assert app.post(path, GOOD).status_code == 200


def test_lone_surrogates_become_the_replacement_character(wire):
    app = wire()
    document = b'{"text": "\\uDFFF", "\\udc00": ["\\ud800", "\\ud83d\\ude00"]}'
    raw = b'{"query": "\\ud83d q", "documents": [' + document + b'], "return_documents": true}'
    response = app.post("/v1/rerank", raw)
    assert response.status_code == 200
    assert app.worker.jobs[0].query == "\ufffd q"
    assert response.json()["results"][0]["document"] == {"text": "\ufffd", "\ufffd": ["\ufffd", "\U0001f600"]}


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ('application/json; charset="UTF-8"', 200),
        ("application/vnd.api+json", 200),
        ("application/json; charset=latin-1", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
        (";", 415),
        ("json", 415),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_content_types(wire, path, content_type, status):
    response = wire().request("POST", path, content=GOOD, headers={"content-type": content_type})
    assert response.status_code == status
    if status == 415:
        assert response.json()["message"].startswith("content-type: must be application/json")


def test_missing_content_type(wire):
    response = wire().request("POST", "/v2/rerank", content=GOOD)
    assert response.status_code == 415


@pytest.mark.parametrize("path", PATHS)
def test_body_over_the_limit_is_refused_while_it_streams(wire, path):
    app = wire(max_body_bytes=1000)
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 500
            yield b"x" * 500

    headers = {"content-type": "application/json"}
    response = app.request("POST", path, content=endless(), headers=headers)
    assert response.status_code == 413
    assert response.json()["message"] == "body: must not be larger than 1000 bytes"
    assert sent <= 5000
    assert app.post(path, GOOD + b" " * (1000 - len(GOOD))).status_code == 200
    assert app.post(path, GOOD + b" " * (1001 - len(GOOD))).status_code == 413


def test_undecided_path_answers_in_both_shapes(wire):
    body = wire().post("/rerank", b"{").json()
    message = "body: is not valid JSON (line 1, column 2)"
    assert body == {
        "error": message,
        "error_type": "Validation",
        "id": body["id"],
        "message": message,
        "detail": message,
    }


def test_parsing_is_bounded_in_time():
    half = b'{"query": "' + b'\\"' * 2_000_000 + b'", "x": ['
    started = time.perf_counter()
    for raw in (half + b"[]," * 1_000_000, b'{"x": "' + b'\\"' * 3_000_000, b"{" * 5_000_000):
        with pytest.raises((InputTooLong, InvalidBody)):
            parse_object(raw)
    assert time.perf_counter() - started < 3


@pytest.mark.parametrize(
    ("error", "status", "kind", "tei_type"),
    [
        (InvalidBody("body", "m"), 400, "invalid_request_error", "Validation"),
        (EmptyInput("documents", "m"), 400, "invalid_request_error", "Empty"),
        (Unauthorized("m"), 401, "authentication_error", "Unauthorized"),
        (UnknownModel("model", "m"), 404, "not_found_error", "Validation"),
        (InputTooLong("query", "m", 1), 413, "request_too_large", "Validation"),
        (UnsupportedContentType("content-type", "m"), 415, "invalid_request_error", "Validation"),
        (InputError("top_n", "m", 1), 422, "validation_error", "Validation"),
        (EngineOverloaded("m", 3.4), 429, "overloaded_error", "Overloaded"),
        (NonFiniteScore("m"), 500, "internal_error", "Backend"),
        (InternalError("m"), 500, "internal_error", "Backend"),
        (DataError("f", "m"), 500, "internal_error", "Backend"),
        (EngineError("m"), 500, "internal_error", "Backend"),
        (HeadRankError("m"), 500, "internal_error", "Backend"),
        (EngineUnavailable("m"), 503, "unavailable_error", "Unhealthy"),
        (ModelError("m"), 503, "unavailable_error", "Backend"),
        (UnsupportedModel("m"), 503, "unavailable_error", "Backend"),
        (BankError("m"), 503, "unavailable_error", "Backend"),
        (BankMismatch("f", 1, 2, "m"), 503, "unavailable_error", "Backend"),
        (DeadlineExceeded("m"), 504, "timeout_error", "Backend"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_error_table(error, status, kind, tei_type):
    failed = failure(error, "id1")
    assert failed.kind.status == status
    field = getattr(error, "field", None) if isinstance(error, InputError) else None
    detail = {"message": str(error), "type": kind, "param": field, "code": status}
    assert cohere_body(failed) == {"id": "id1", "message": str(error), "detail": str(error), "error": detail}
    assert tei_body(failed) == {"error": str(error), "error_type": tei_type}
    expected = {429: {"retry-after": "3"}, 503: {"retry-after": "2"}, 401: {"www-authenticate": "Bearer"}}
    assert failed.headers == {"x-request-id": "id1"} | expected.get(status, {})


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("bug about SECRET", 500, "internal error, request "),
        ("nan SECRET", 500, "a document's score is not a finite number"),
        ("long SECRET", 413, "documents: too long"),
    ],
)
def test_errors_of_the_engine(scripted, caplog, query, status, message):
    response = scripted.post("/v2/rerank", {"query": query, "documents": ["a"]})
    assert response.status_code == status
    assert response.json()["message"].startswith(message)
    assert "SECRET" not in response.text + caplog.text
    if query.startswith("bug"):
        assert response.json()["id"] in response.json()["message"]
        assert response.json()["id"] in caplog.text
        assert "ValueError at" in caplog.text
        assert "engines.py" in caplog.text


def test_unforeseen_error_of_the_service_itself(scripted, caplog, monkeypatch):
    def fail(*_):
        raise RuntimeError("SECRET")

    monkeypatch.setattr("service.dialects._texts", fail)
    response = scripted.post("/v2/rerank", {"query": "plain", "documents": ["a"]})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_error"
    assert "RuntimeError at" in caplog.text
    assert "SECRET" not in response.text + caplog.text


KEYED = ["/v2/rerank", "/v1/rerank", "/rerank", "/info", "/v1/models"]
OPEN = ["/health", "/readyz", "/metrics", "/docs", "/openapi.json"]


def with_key(app, path, authorization):
    headers = {} if authorization is None else {"authorization": authorization}
    if path.endswith("rerank"):
        return app.post(path, GOOD, **headers)
    return app.get(path, headers=headers)


@pytest.mark.parametrize("path", KEYED)
@pytest.mark.parametrize(
    ("authorization", "allowed"),
    [
        ("Bearer first", True),
        ("Bearer second", True),
        ("bearer  second ", True),
        ("second", True),
        (None, False),
        ("", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("Bearer firs", False),
        ("Bearer first2", False),
        ("Bearer first,second", False),
        ("Basic first", False),
        ("Bearer \xe9", False),
        ("Bearer cl\xc3\xa9", True),
    ],
)
def test_keys(wire, path, authorization, allowed):
    app = wire(api_keys="first, second,clé")
    response = with_key(app, path, None if authorization is None else authorization.encode("latin-1"))
    assert response.status_code == (200 if allowed else 401)
    if not allowed:
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["message"].startswith("the API key is missing or wrong")
        assert app.worker.jobs == []
        if path == "/rerank":
            assert response.json()["error_type"] == "Unauthorized"


@pytest.mark.parametrize("path", OPEN)
def test_probes_need_no_key(wire, path):
    assert wire(api_keys="first").get(path).status_code == 200


def test_key_is_checked_before_the_body(wire):
    assert wire(api_keys="first").post("/v2/rerank", b"{").status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/rerank", 405), ("PUT", "/rerank", 405), ("GET", "/", 404), ("POST", "/v1/SECRET", 404)],
)
def test_unknown_routes_answer_in_the_error_shape(wire, method, path, status):
    response = wire().request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status
    assert response.json()["detail"] == response.json()["message"]
    assert "SECRET" not in response.text
    assert ("allow" in response.headers) == (status == 405)
