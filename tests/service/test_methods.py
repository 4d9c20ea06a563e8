"""Which reranker answers a job; embedding models that load late; fusion over the fake model."""

import math
from dataclasses import replace

import pytest

from headbank.errors import InputError, ModelError
from headbank.models.fake import FAKE_HEAD_SETS, FakeRunner
from headbank.rerankers.bm25 import BM25
from headbank.rerankers.heads import HeadReranker
from headbank.types import Fusion, HeadSet, Ranking, RankOptions
from service.engine import Job, RerankEngine
from service.methods import LazyReranker, Methods, head_sets
from service.settings import Settings
from tests.service.engines import INFO
from tests.support.banks import bank_of_sets

QUERY = "capital of France"
DOCUMENTS = ("Berlin is in Germany.", "The capital of France is Paris.", "France is large.")


def job(method, **options):
    return Job("id", method, QUERY, DOCUMENTS, RankOptions(**options))


class Fixed:
    """Scores 0, 1, 2, ... and keeps what it was made for."""

    name = "dense"

    def __init__(self, model=""):
        self.model = model

    def rank(self, query, documents, options):
        scores = tuple(map(float, range(len(documents))))
        return Ranking(scores, tuple(reversed(range(len(documents)))), "dense")


def fusion(heads, voters, dense_model="", weights=None):
    """Standardised features are the features themselves; so is the sum, in the eyes of its sigmoid."""
    count = 1 + len(voters)
    return Fusion(
        f"fusion.{heads.view}.{heads.style.layout}",
        heads.name,
        voters,
        dense_model,
        (0.0,) * count,
        (1.0,) * count,
        weights or (1.0,) * count,
        (1.0, 0.0),
    )


JOINT, JOINT_RESPONSE, PARALLEL, _ = FAKE_HEAD_SETS


def methods_of(*fusions, load_dense=Fixed, sets=FAKE_HEAD_SETS, defaults=None, **settings):
    runner = FakeRunner()
    bank = replace(bank_of_sets(runner.info, sets), fusions={f.name: f for f in fusions})
    if defaults is not None:
        bank = replace(bank, defaults=defaults)
    return Methods(runner, bank, Settings(**{"model": "fake", **settings}), load_dense)


def refused(methods, job):
    with pytest.raises(InputError) as error:
        methods.choose(job)
    return error.value.field


# Embedding models


def test_dense_is_loaded_once_at_its_first_use():
    loaded = []

    def load(model):
        loaded.append(model)
        return Fixed(model)

    engine = RerankEngine(INFO, methods_of(load_dense=load, dense_model="small").choose)
    assert isinstance(engine.rank_many([job("heads")])[0], Ranking)
    assert loaded == []
    results = engine.rank_many([job("dense")] * 2) + engine.rank_many([job("dense")])
    assert [r.scores for r in results] == [(0.0, 1.0, 2.0)] * 3
    assert loaded == ["small"]


def test_dense_that_cannot_be_loaded_fails_its_requests_only_and_fast(monkeypatch):
    loads = []

    def load(model):
        loads.append(1)
        raise ModelError("the embedding model cannot be loaded")

    engine = RerankEngine(INFO, methods_of(load_dense=load).choose)
    for _ in range(2):
        results = engine.rank_many([job("dense"), job("heads"), job("dense")])
        assert [type(r) for r in results] == [ModelError, Ranking, ModelError]
    assert loads == [1]
    monkeypatch.setattr("service.methods.LOAD_RETRY_S", 0.0)
    with pytest.raises(ModelError):
        LazyReranker("dense", lambda: load("x")).rank("q", ["a"], RankOptions())
    assert isinstance(engine.rank_many([job("dense")])[0], ModelError)
    assert loads == [1, 1, 1]


# Fusion


def test_fusion_adds_the_voters_to_the_heads():
    runner = FakeRunner()
    methods = methods_of(fusion(JOINT, ("bm25", "dense"), "small", (0.5, 0.25, 2.0)))
    chosen = methods.choose(job("fusion"))
    found = chosen.rank(QUERY, DOCUMENTS, RankOptions())
    heads = HeadReranker(runner, bank_of_sets(runner.info, FAKE_HEAD_SETS))
    z = heads.rank(QUERY, DOCUMENTS, RankOptions(aggregation="evidence")).raw_scores
    sums = BM25().rank(QUERY, DOCUMENTS, RankOptions()).raw_scores
    expected = [0.5 * z[i] + 0.25 * sums[i] + 2.0 * i for i in range(3)]
    assert found.raw_scores == pytest.approx(expected)
    assert found.scores == pytest.approx([1 / (1 + math.exp(-value)) for value in expected])
    assert found.method == "fusion"
    assert methods.names == ("heads", "icr", "fusion", "llm", "bm25", "dense")


def test_fusion_takes_the_embedding_model_that_it_was_fitted_with_and_shares_it():
    loaded = []

    def load(model):
        loaded.append(model)
        return Fixed(model)

    methods = methods_of(
        fusion(JOINT, ("dense",), "fitted"),
        fusion(PARALLEL, ("dense",), "fitted"),
        load_dense=load,
        dense_model="mine",
    )
    assert loaded == []
    for layout in ("joint", "parallel", None):
        methods.choose(job("fusion", layout=layout)).rank(QUERY, DOCUMENTS, RankOptions(layout=layout))
    assert loaded == ["fitted"]
    methods.choose(job("dense")).rank(QUERY, DOCUMENTS, RankOptions())
    assert loaded == ["fitted", "mine"]


def test_fusion_without_its_embedding_model_reads_no_heads(monkeypatch):
    def load(model):
        raise ModelError("the embedding model cannot be loaded")

    monkeypatch.setattr(FakeRunner, "capture_many", lambda *_: pytest.fail("the heads were read"))
    engine = RerankEngine(INFO, methods_of(fusion(JOINT, ("dense",), "small"), load_dense=load).choose)
    assert [type(r) for r in engine.rank_many([job("fusion")])] == [ModelError]


def test_fusion_of_a_view_or_layout_that_is_not_there_names_the_field():
    methods = methods_of(fusion(JOINT, ("bm25",)))
    assert methods.choose(job("fusion", layout="joint")) is methods.choose(job("fusion"))
    assert refused(methods, job("fusion", layout="parallel")) == "layout"
    assert refused(methods, job("fusion", view="response")) == "view"
    assert refused(methods_of(), job("fusion")) == "method"
    # Fusions of the response view alone are none where only the query view is served.
    response = fusion(JOINT_RESPONSE, ("bm25",))
    assert refused(methods_of(response, views="query"), job("fusion")) == "method"
    both = methods_of(fusion(JOINT, ("bm25",)), fusion(PARALLEL, ("bm25",)), defaults={})
    assert refused(both, job("fusion")) == "layout"
    assert both.choose(job("fusion", layout="parallel")) is not both.choose(job("fusion", layout="joint"))


# Heads


def test_layouts_of_other_detectors_are_not_served():
    other = HeadSet("qr.query.parallel", "qr", "query", PARALLEL.heads, "borda", PARALLEL.style)
    methods = methods_of(sets=[JOINT, other])
    assert [heads.name for heads in methods.head_sets()] == ["expert.query.joint"]
    assert refused(methods, job("heads", layout="parallel")) == "layout"


def test_default_of_a_view_comes_first():
    runner = FakeRunner()
    bank = replace(bank_of_sets(runner.info, FAKE_HEAD_SETS), defaults={"query": PARALLEL.name})
    assert [heads.name for heads in head_sets(bank, ("query", "response"))] == [PARALLEL.name, JOINT.name]


def test_icr_reads_all_heads_in_the_view_of_the_query():
    engine = RerankEngine(INFO, methods_of().choose)
    found, response = engine.rank_many([job("icr"), job("icr", view="response")])
    assert (found.method, found.order[0]) == ("icr", 1)
    assert response.field == "view"
