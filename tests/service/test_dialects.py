"""Bodies in, bodies out: every dialect over the fake engine."""

import math

import pytest

from service.schemas import ErrorResponse, RerankResponse

QUERY = "capital of France"
DOCUMENTS = ["Berlin is in Germany.", "The capital of France is Paris.", "France is large."]
ORDER = [1, 2, 0]

COHERE = ["/v2/rerank", "/v1/rerank", "/rerank"]


def indices(response):
    assert response.status_code == 200, response.text
    return [result["index"] for result in response.json()["results"]]


def problem(response, status):
    """(message, field) of an error in the Cohere shape."""
    assert response.status_code == status, response.text
    body = ErrorResponse.model_validate(response.json(), extra="forbid")
    assert body.message == body.detail == body.error.message
    assert body.error.code == status
    return body.message, body.error.param


@pytest.mark.parametrize("path", COHERE)
def test_cohere_answer_in_full(wire, path):
    response = wire().post(path, {"model": "rerank-v3.5", "query": QUERY, "documents": DOCUMENTS})
    assert response.status_code == 200
    body = response.json()
    tokens = body["usage"]["prompt_tokens"]
    # 8 fixed words before, 3 labels of 2, 5 + 7 + 4 tokens of documents, 4 fixed words and 3 of the query.
    assert tokens == 8 + 6 + 16 + 4 + 3
    assert body == {
        "id": response.headers["x-request-id"],
        "object": "list",
        "model": "fake",
        "results": [
            {"index": 1, "relevance_score": 1.0},
            {"index": 2, "relevance_score": 0.5},
            {"index": 0, "relevance_score": 0.0},
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {
            "api_version": {"version": "2" if path == "/v2/rerank" else "1"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": tokens},
            "method": "heads",
        },
    }
    RerankResponse.model_validate(body, extra="forbid")


@pytest.mark.parametrize("path", COHERE)
@pytest.mark.parametrize(
    ("top_n", "expected"),
    [
        (1, ORDER[:1]),
        (2, ORDER[:2]),
        (3, ORDER),
        (4, ORDER),
        (10**30, ORDER),
        (None, ORDER),
        ("2", ORDER[:2]),
        (2.0, ORDER[:2]),
        (0, 422),
        (-1, 422),
        (2.5, 422),
        (True, 422),
        (False, 422),
        ("many", 422),
        ("", 422),
        ([1], 422),
        ({}, 422),
    ],
)
def test_top_n(wire, path, top_n, expected):
    response = wire().post(path, {"query": QUERY, "documents": DOCUMENTS, "top_n": top_n})
    if expected == 422:
        assert problem(response, 422)[1] == "top_n"
    else:
        assert indices(response) == expected


def test_top_k_is_an_alias(wire):
    assert indices(wire().post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_k": 1})) == [1]
    response = wire().post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_k": 0})
    assert problem(response, 422) == ("top_k: Input should be greater than or equal to 1", "top_k")


@pytest.mark.parametrize("path", COHERE)
@pytest.mark.parametrize(
    "extra",
    [
        {
            "model": None,
            "top_n": None,
            "max_tokens_per_doc": None,
            "rank_fields": None,
            "return_documents": None,
        },
        {
            "priority": 3,
            "max_chunks_per_doc": 10,
            "user": "u",
            "truncate_prompt_tokens": -1,
            "return_len": "true",
        },
        {"return_documents": "false", "max_tokens_per_doc": 4096},
        {
            "method": None,
            "view": None,
            "layout": None,
            "aggregation": None,
            "raw_scores": None,
            "explain": None,
        },
    ],
)
def test_what_clients_add_changes_nothing(wire, path, extra):
    plain = {"query": QUERY, "documents": DOCUMENTS}
    first, second = wire().post(path, plain).json(), wire().post(path, plain | extra).json()
    assert first.pop("id") != second.pop("id")
    assert first == second


@pytest.mark.parametrize("value", [True, "true", "True", 1, "1", "yes"])
@pytest.mark.parametrize("path", COHERE)
def test_documents_come_back_as_objects(wire, path, value):
    response = wire().post(path, {"query": QUERY, "documents": DOCUMENTS, "return_documents": value})
    assert [r["document"] for r in response.json()["results"]] == [{"text": DOCUMENTS[i]} for i in ORDER]


@pytest.mark.parametrize("path", COHERE)
def test_object_documents(wire, path):
    documents = [
        "Paris was mentioned.",
        {"text": "The capital of France is Paris.", "page": 7, "tags": ["a", {"b": None}]},
        {"text": "", "title": "France"},
    ]
    response = wire().post(path, {"query": QUERY, "documents": documents, "return_documents": True})
    assert indices(response) == [1, 0, 2]
    assert response.json()["results"][0]["document"] == documents[1]
    assert response.json()["results"][2]["document"] == documents[2]


def ranked(wire, documents, **more):
    app = wire()
    response = app.post("/v1/rerank", {"query": QUERY, "documents": documents, **more})
    assert response.status_code == 200, response.text
    return app.worker.jobs[0].documents, response.json()


def test_rank_fields_choose_the_text_and_its_order(wire):
    documents = [{"title": "T", "body": "B", "year": 1999}, "plain", {"body": "b", "title": "", "year": 0.5}]
    texts, body = ranked(wire, documents, rank_fields=["body", "title", "year"], return_documents=True)
    assert texts == ("body: B\ntitle: T\nyear: 1999", "plain", "body: b\ntitle: \nyear: 0.5")
    sent_back = {r["index"]: r["document"] for r in body["results"]}
    assert sent_back[0] == documents[0] | {"text": texts[0]}
    assert sent_back[1] == {"text": "plain"}
    texts, _ = ranked(wire, [{"text": "x", "title": "T"}], rank_fields=["title"])
    assert texts == ("T",)


@pytest.mark.parametrize(
    ("documents", "rank_fields", "message", "field"),
    [
        (["a", {"title": "b"}], None, "documents[1].text: must be a string", "documents[1].text"),
        ([{"text": None}], None, "documents[0].text: must be a string", "documents[0].text"),
        (
            ["a", {"text": "b", "x": "y"}, {"text": "c"}],
            ["text", "x"],
            "documents[2]: has no text in the field that rank_fields[1] names",
            "documents[2]",
        ),
        (
            [{"text": ["b"]}],
            ["text"],
            "documents[0]: has no text in the field that rank_fields[0] names",
            "documents[0]",
        ),
        (["a", 5], None, "documents[1]: must be a string or an object", "documents[1]"),
        (["a", None], None, "documents[1]: must be a string or an object", "documents[1]"),
        ([["a"]], None, "documents[0]: must be a string or an object", "documents[0]"),
        ("text", None, "documents: Input should be a valid list", "documents"),
        ({"a": "b"}, None, "documents: Input should be a valid list", "documents"),
        (None, None, "documents: Field required", "documents"),
        (["a"], [], "rank_fields: List should have at least 1 item after validation, not 0", "rank_fields"),
        (["a"], [1], "rank_fields[0]: Input should be a valid string", "rank_fields[0]"),
        (["a"], "text", "rank_fields: Input should be a valid list", "rank_fields"),
    ],
)
@pytest.mark.parametrize("path", COHERE)
def test_wrong_documents_are_named_by_position(wire, path, documents, rank_fields, message, field):
    body = {"query": QUERY, "documents": documents, "rank_fields": rank_fields}
    assert problem(wire().post(path, body), 422) == (message, field)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"query": None}, 422, "query: Field required"),
        ({"query": 5}, 422, "query: Input should be a valid string"),
        ({"query": ["a"]}, 422, "query: Input should be a valid string"),
        ({"query": " \n"}, 400, "query: must not be empty"),
        ({"query": "q" * 51}, 413, "query: must not be longer than 50 characters"),
        ({"documents": []}, 400, "documents: must not be empty"),
        ({"documents": ["a"] * 6}, 413, "documents: must not be more than 5"),
        (
            {"return_documents": "perhaps"},
            422,
            "return_documents: Input should be a valid boolean, unable to interpret input",
        ),
        ({"max_tokens_per_doc": 0}, 422, "max_tokens_per_doc: Input should be greater than or equal to 1"),
        (
            {"method": "magic"},
            422,
            "method: Input should be 'heads', 'icr', 'fusion', 'llm', 'bm25' or 'dense'",
        ),
        ({"view": "side"}, 422, "view: Input should be 'query' or 'response'"),
        ({"layout": "pile"}, 422, "layout: Input should be 'joint' or 'parallel'"),
        (
            {"aggregation": "sum"},
            422,
            "aggregation: Input should be 'borda', 'rrf', 'share', 'evidence' or 'calibrated'",
        ),
        ({"raw_scores": 7}, 422, "raw_scores: Input should be a valid boolean, unable to interpret input"),
        ({"explain": 7}, 422, "explain: Input should be a valid boolean, unable to interpret input"),
        ({"model": 3}, 422, "model: Input should be a valid string"),
    ],
)
@pytest.mark.parametrize("path", COHERE)
def test_wrong_values(wire, path, change, status, message):
    body = {"query": QUERY, "documents": DOCUMENTS} | change
    app = wire(max_documents=5, max_query_chars=50)
    assert problem(app.post(path, body), status)[0] == message


def test_any_model_name_is_taken_unless_strict(wire):
    body = {"query": QUERY, "documents": DOCUMENTS}
    loose = wire(served_model_name="mine")
    assert loose.post("/v2/rerank", body | {"model": "rerank-v3.5"}).json()["model"] == "mine"
    strict = wire(served_model_name="mine", strict_model_name=True)
    assert strict.post("/v2/rerank", body | {"model": "mine"}).status_code == 200
    assert strict.post("/v2/rerank", body).status_code == 200
    message, field = problem(strict.post("/v2/rerank", body | {"model": "rerank-v3.5"}), 404)
    assert (message, field) == ("model: is not served here; GET /v1/models lists what is", "model")


def test_our_extras(wire):
    app = wire()
    for change in (
        {"method": "bm25"},
        {"view": "response"},
        {"aggregation": "share"},
        {"aggregation": "rrf", "view": "query", "method": "heads"},
        {"aggregation": "evidence", "layout": "joint"},
        {"aggregation": "calibrated", "layout": "parallel"},
        {"method": "icr"},
        {"method": "icr", "layout": "parallel", "aggregation": "share"},
        {"method": "llm"},
    ):
        response = app.post("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS} | change)
        assert indices(response)[0] == 1
        assert response.json()["meta"]["method"] == change.get("method", "heads")
    options = [(j.method, j.options.view, j.options.layout, j.options.aggregation) for j in app.worker.jobs]
    assert options == [
        ("bm25", "query", None, None),
        ("heads", "response", None, None),
        ("heads", "query", None, "share"),
        ("heads", "query", None, "rrf"),
        ("heads", "query", "joint", "evidence"),
        ("heads", "query", "parallel", "calibrated"),
        ("icr", "query", None, None),
        ("icr", "query", "parallel", "share"),
        ("llm", "query", None, None),
    ]


@pytest.mark.parametrize("method", ["heads", "bm25"])
@pytest.mark.parametrize("path", COHERE)
def test_raw_scores_are_on_an_open_scale_in_the_same_order(wire, path, method):
    body = {"query": QUERY, "documents": DOCUMENTS, "method": method, "aggregation": "evidence"}
    plain, raw = (wire().post(path, body | more).json()["results"] for more in ({}, {"raw_scores": True}))
    assert [r["index"] for r in plain] == [r["index"] for r in raw] == ORDER
    if method == "bm25":
        expected = [r["relevance_score"] / (r["relevance_score"] + 10) for r in raw]
    else:  # The fake's bank has a = 1 and b = 0.
        expected = [1 / (1 + math.exp(-r["relevance_score"])) for r in raw]
    assert [r["relevance_score"] for r in plain] == pytest.approx(expected)


def test_raw_scores_of_a_vote_are_its_scores(wire):
    body = {"query": QUERY, "documents": DOCUMENTS, "aggregation": "borda", "raw_scores": True}
    assert [r["relevance_score"] for r in wire().post("/v1/rerank", body).json()["results"]] == [
        1.0,
        0.5,
        0.0,
    ]


def test_defaults_come_from_the_settings(wire):
    app = wire(default_method="bm25", default_view="response", max_tokens_per_doc=9)
    for asked in (None, 5, 4096):
        app.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "max_tokens_per_doc": asked})
    app.post("/rerank", {"query": QUERY, "texts": DOCUMENTS})
    assert [(j.method, j.options.view, j.options.max_tokens_per_doc) for j in app.worker.jobs] == [
        ("bm25", "response", 9),
        ("bm25", "response", 5),
        ("bm25", "response", 9),
        ("bm25", "response", 9),
    ]


def test_icr_keeps_to_the_view_it_has(wire):
    app = wire(default_view="response")
    for change in ({}, {"method": "icr"}, {"method": "icr", "view": "query"}):
        assert indices(app.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS} | change))[0] == 1
    assert [j.options.view for j in app.worker.jobs] == ["response", "query", "query"]
    asked = {"query": QUERY, "documents": DOCUMENTS, "method": "icr", "view": "response"}
    assert problem(app.post("/v1/rerank", asked), 422)[1] == "view"
    app = wire(default_view="response", default_method="icr")
    assert app.post("/rerank", {"query": QUERY, "texts": DOCUMENTS}).json()[0]["index"] == 1


def test_explain(wire):
    response = wire().post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "explain": True})
    RerankResponse.model_validate(response.json(), extra="forbid")
    best = response.json()["results"][0]
    [vote] = best["votes"]
    tokens = response.json()["usage"]["prompt_tokens"]
    # 2 of the 3 words that match lie here; the background reaches all 7 of its tokens.
    assert vote["mass"] == pytest.approx(0.9 * 2 / 3 + 0.1 * 7 / tokens)
    assert vote == {"head": "L2H1", "rank": 1, "mass": vote["mass"], "mean": pytest.approx(vote["mass"] / 7)}
    [snippet] = best["snippets"]
    assert snippet == {"start": 0, "end": 31, "text": DOCUMENTS[1], "weight": pytest.approx(1.0)}
    assert [r["votes"][0]["rank"] for r in response.json()["results"]] == [1, 2, 3]


def test_explain_of_a_method_without_heads_is_empty(wire):
    body = {"query": QUERY, "documents": DOCUMENTS, "explain": True, "method": "bm25"}
    for result in wire().post("/v1/rerank", body).json()["results"]:
        assert result["votes"] == result["snippets"] == []


def test_cut_documents_are_reported(fake_engine, wire):
    app = wire(fake_engine, max_tokens_per_doc=4)
    body = {
        "query": QUERY,
        "documents": ["one two three four five", "short", "France is a country in Europe"],
    }
    assert app.post("/v2/rerank", body).json()["meta"]["warnings"] == [
        "documents over the token limit were cut at their end, by index: 0, 2"
    ]
    assert 'headrank_documents_cut_total{method="heads"} 2.0' in app.get("/metrics").text


def test_ties_keep_the_order_of_the_input_and_repeat_exactly(wire):
    body = {"query": QUERY, "documents": ["same", "", "same", "France", "same"], "return_documents": True}
    app = wire()
    answers = [app.post("/v2/rerank", body).json()["results"] for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert [r["index"] for r in answers[0]] == [3, 0, 2, 4, 1]


def test_search_units_count_hundreds(scripted):
    for documents, units in ((100, 1), (101, 2), (1000, 10)):
        body = scripted.post("/v2/rerank", {"query": "plain", "documents": ["d"] * documents}).json()
        assert body["meta"]["billed_units"] == {"search_units": units}


# Which dialect


def test_documents_decide_when_both_keys_are_there(wire):
    response = wire().post("/rerank", {"query": QUERY, "documents": DOCUMENTS, "texts": ["x"]})
    assert indices(response) == ORDER


def test_texts_elsewhere_are_no_documents(wire):
    for path in ("/v1/rerank", "/v2/rerank"):
        response = wire().post(path, {"query": QUERY, "texts": DOCUMENTS})
        assert problem(response, 422) == ("documents: Field required", "documents")
