"""Bodies in, bodies out: the dialect of Text Embeddings Inference over the fake engine."""

import pytest

from service.schemas import TeiErrorResponse, TeiRank

QUERY = "capital of France"
DOCUMENTS = ["Berlin is in Germany.", "The capital of France is Paris.", "France is large."]
ORDER = [1, 2, 0]


def test_tei_answer_in_full(wire):
    response = wire().post("/rerank", {"query": QUERY, "texts": DOCUMENTS})
    assert response.status_code == 200
    assert response.json() == [
        {"index": 1, "score": 1.0},
        {"index": 2, "score": 0.5},
        {"index": 0, "score": 0.0},
    ]
    headers = response.headers
    assert headers["x-compute-type"] == "cpu"
    assert headers["x-compute-characters"] == str(len(QUERY) + sum(map(len, DOCUMENTS)))
    assert headers["x-compute-tokens"] == "37"
    for name in ("compute-time", "total-time", "tokenization-time", "queue-time", "inference-time"):
        assert headers[f"x-{name}"].isdigit()


def test_tei_options(wire):
    body = {
        "query": QUERY,
        "texts": DOCUMENTS,
        "raw_scores": True,
        "return_text": "true",
        "truncate": None,
        "truncation_direction": "left",
        "top_n": 1,
        "model": "any",
    }
    response = wire().post("/rerank", body)
    assert [(r["index"], r["text"]) for r in response.json()] == [(i, DOCUMENTS[i]) for i in ORDER]
    for rank in response.json():
        TeiRank.model_validate(rank, extra="forbid")


def test_tei_raw_scores(wire):
    body = {"query": QUERY, "texts": DOCUMENTS}
    app = wire(default_method="bm25")
    raw, plain = (
        [r["score"] for r in app.post("/rerank", body | {"raw_scores": on}).json()] for on in (True, None)
    )
    assert raw[0] > 1
    assert plain == [pytest.approx(s / (s + 10)) for s in raw]


@pytest.mark.parametrize(
    ("change", "status", "error", "error_type"),
    [
        ({"texts": []}, 400, "texts: must not be empty", "Empty"),
        ({"query": ""}, 400, "query: must not be empty", "Empty"),
        ({"texts": ["a"] * 6}, 413, "texts: must not be more than 5", "Validation"),
        ({"texts": ["a", 1]}, 422, "texts[1]: must be a string", "Validation"),
        ({"texts": [{"text": "a"}]}, 422, "texts[0]: must be a string", "Validation"),
        ({"texts": "a"}, 422, "texts: Input should be a valid list", "Validation"),
        ({"texts": None}, 422, "texts: Field required", "Validation"),
        (
            {"raw_scores": "perhaps"},
            422,
            "raw_scores: Input should be a valid boolean, unable to interpret input",
            "Validation",
        ),
        (
            {"truncation_direction": "up"},
            422,
            "truncation_direction: Input should be 'Right', 'right', 'Left' or 'left'",
            "Validation",
        ),
    ],
)
def test_tei_errors(wire, change, status, error, error_type):
    response = wire(max_documents=5).post("/rerank", {"query": QUERY, "texts": DOCUMENTS} | change)
    assert response.status_code == status
    TeiErrorResponse.model_validate(response.json(), extra="forbid")
    assert response.json() == {"error": error, "error_type": error_type}


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 200),
        ({"truncate": True, "truncation_direction": "Right"}, 200),
        ({"truncate": False}, 422),
        ({"truncation_direction": "Left"}, 422),
    ],
)
def test_tei_refuses_to_cut_where_asked(wire, options, status):
    app = wire(max_tokens_per_doc=4)
    response = app.post("/rerank", {"query": QUERY, "texts": ["a", "one two three four five"]} | options)
    assert response.status_code == status
    if status == 422:
        assert response.json() == {
            "error": "texts[1]: is over the token limit; only truncate=true with truncation_direction=Right cuts it",
            "error_type": "Validation",
        }
