"""What the service says of itself, what it does not offer, and its metrics: over the fake engine."""

from dataclasses import replace

import pytest

from headbank.models.fake import FAKE_HEAD_SETS, FakeRunner
from service.engine import CacheCounts, RerankEngine
from service.methods import Methods
from service.schemas import Info, ServedModels
from service.settings import Settings
from tests.service.engines import INFO, ScriptedEngine
from tests.support.banks import bank_of_sets

QUERY = "capital of France"
DOCUMENTS = ["Berlin is in Germany.", "The capital of France is Paris.", "France is large."]

VIEWS_OF_THE_FAKE = {
    "query": {"head_set": "expert.query.parallel", "layout": "parallel"},
    "response": {"head_set": "expert.response.parallel", "layout": "parallel"},
}


def test_info_is_what_tei_clients_read_and_tells_limits_and_heads(wire):
    info = wire(max_documents=7, max_tokens_per_doc=33, batch_tokens=99).get("/info").json()
    Info.model_validate(info, extra="forbid")
    assert next(iter(info["model_type"])) == "reranker"
    assert (info["model_id"], info["max_client_batch_size"], info["max_input_length"]) == ("fake", 7, 33)
    assert info["limits"]["max_documents"] == 7
    assert info["max_batch_tokens"] == 99
    assert [(h["name"], h["view"], h["layout"], h["heads"]) for h in info["head_sets"]] == [
        ("expert.query.parallel", "query", "parallel", ["L2H1"]),
        ("expert.query.joint", "query", "joint", ["L2H1"]),
        ("expert.response.parallel", "response", "parallel", ["L2H1"]),
        ("expert.response.joint", "response", "joint", ["L2H1"]),
    ]
    assert info["views"] == VIEWS_OF_THE_FAKE
    assert info["methods"] == ["heads", "icr", "llm", "bm25", "dense"]


def test_models(wire):
    body = wire(served_model_name="mine").get("/v1/models").json()
    ServedModels.model_validate(body, extra="forbid")
    [model] = body["data"]
    assert model["id"] == "mine"
    assert model["views"] == VIEWS_OF_THE_FAKE
    assert model["methods"] == ["heads", "icr", "llm", "bm25", "dense"]


def test_models_while_none_is_loaded(wire):
    app = wire(served_model_name="later")
    app.worker.info = None
    [model] = app.get("/v1/models").json()["data"]
    assert (model["id"], model["methods"], model["views"]) == ("later", [], {})
    assert app.get("/info").status_code == 503


QUERY_JOINT = FAKE_HEAD_SETS[0]


def engine_of(head_sets, **options):
    """The fake model with a bank of these head sets."""
    runner = FakeRunner()
    settings = Settings(model="fake", **options)
    methods = Methods(runner, bank_of_sets(runner.info, head_sets), settings, lambda model: None)
    return RerankEngine(replace(INFO, methods=methods.names), methods.choose)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"view": "response"}, {}, "view: the head bank has no heads for the view response"),
        (
            {"layout": "parallel"},
            {},
            "layout: the head bank has no heads for the view query in parallel, only in joint",
        ),
        (
            {"aggregation": "evidence"},
            {},
            "aggregation: evidence was not fitted for the head set expert.query.joint",
        ),
        (
            {"aggregation": "evidence", "method": "icr"},
            {},
            "aggregation: evidence was not fitted for the method icr",
        ),
        ({"method": "fusion"}, {}, "method: the head bank has no fusion; /info lists the methods there are"),
        ({"view": "response"}, {"views": "query"}, "view: response is not served (setting views)"),
        (
            {"method": "icr"},
            {"views": "query"},
            "method: icr is not served, it needs all layers (setting views)",
        ),
        (
            {"method": "llm"},
            {"views": "query"},
            "method: llm is not served, it needs all layers (setting views)",
        ),
    ],
)
def test_what_the_bank_or_the_settings_do_not_offer_is_the_callers_error(wire, change, options, message):
    app = wire(engine_of([replace(QUERY_JOINT, z_mean=(), z_std=())], **options))
    body = {"query": QUERY, "documents": DOCUMENTS}
    refused = app.post("/v2/rerank", body | change)
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert (error["message"], error["param"]) == (message, message.partition(":")[0])
    assert app.post("/v2/rerank", body).status_code == 200
    if "method" not in change:
        # What only heads have is no matter for the others.
        assert app.post("/v2/rerank", body | change | {"method": "bm25"}).status_code == 200


def test_metrics_of_batches_and_of_the_document_cache(wire):
    app = wire(ScriptedEngine())
    app.worker.on_batch(3, 700)
    app.worker.cache = CacheCounts(hits=5, misses=2, device_bytes=640, host_bytes=64, documents=4)
    text = app.get("/metrics").text
    for line in (
        'headrank_batch_requests_bucket{le="2.0"} 0.0',
        'headrank_batch_requests_bucket{le="4.0"} 1.0',
        "headrank_batch_requests_sum 3.0",
        'headrank_batch_tokens_bucket{le="512.0"} 0.0',
        "headrank_batch_tokens_sum 700.0",
        "headrank_document_cache_hits_total 5.0",
        "headrank_document_cache_misses_total 2.0",
        'headrank_document_cache_bytes{tier="device"} 640.0',
        'headrank_document_cache_bytes{tier="host"} 64.0',
        "headrank_document_cache_documents 4.0",
    ):
        assert line in text.splitlines(), line


def test_metrics_count_requests_work_and_errors(wire):
    app = wire(ScriptedEngine())
    app.post("/v2/rerank", {"query": "plain", "documents": ["a", "b"]})
    app.post("/rerank", {"query": "plain", "texts": ["a"]})
    app.post("/rerank", {"query": "plain", "texts": []})
    text = app.get("/metrics").text
    for line in (
        'headrank_requests_total{dialect="cohere_v2",status="200"} 1.0',
        'headrank_requests_total{dialect="tei",status="200"} 1.0',
        'headrank_requests_total{dialect="tei",status="400"} 1.0',
        'headrank_errors_total{error="EmptyInput"} 1.0',
        'headrank_documents_total{method="heads"} 3.0',
        'headrank_input_tokens_total{method="heads"} 22.0',
        'headrank_stage_seconds_count{method="heads",stage="forward"} 2.0',
        "headrank_ready 1.0",
        "headrank_queue_waiting 0.0",
    ):
        assert line in text.splitlines(), line
