"""What lives in the child process, in this process: batches, and what fails in them."""

import pytest

from headbank.errors import InputError, NonFiniteScore
from headbank.types import Ranking, RankOptions
from service.engine import CacheCounts, DeviceLost, Job, RerankEngine, isolated
from service.errors import InternalError
from tests.service.engines import INFO, AcceleratorError


def job(query="q", method="heads", view="query"):
    return Job(f"id-{query}", method, query, ("a",), RankOptions(view=view))


class Alone:
    """Ranks one task at a time; the query says what happens."""

    name = "alone"

    def __init__(self):
        self.seen = []

    def rank(self, query, documents, options):
        self.seen.append(query)
        return result_of(query)


class Sharing(Alone):
    """Ranks tasks together."""

    def rank_many(self, tasks):
        self.seen.append([task.query for task in tasks])
        return [result_of(task.query) for task in tasks]


def result_of(query):
    verb, _, score = query.partition(" ")
    if verb == "bug":
        raise ValueError(f"about {query}")
    if verb == "device":
        raise AcceleratorError("illegal memory access")
    if verb == "refuse":
        raise InputError("documents", "cannot be read together")
    return Ranking((float(score or 0.5),), (0,), "m", raw_scores=(float("nan"),) if verb == "raw" else None)


def engine_of(**rerankers):
    def choose(job):
        if job.method not in rerankers:
            raise InputError("method", "is not there")
        return rerankers[job.method]

    return RerankEngine(INFO, choose)


def kinds(results):
    return [type(result).__name__ for result in results]


def test_jobs_of_a_method_and_view_share_and_results_keep_the_order_of_the_jobs():
    heads, icr, bm25 = Sharing(), Sharing(), Alone()
    jobs = [
        job("rank 0.1"),
        job("rank 0.2", "bm25"),
        job("rank 0.3", "icr"),
        job("rank 0.4", view="response"),
        job("rank 0.5", "dense"),
        job("rank 0.6"),
        job("rank 0.7", "bm25"),
    ]
    results = engine_of(heads=heads, icr=icr, bm25=bm25).rank_many(jobs)
    assert [r.scores[0] for r in results if isinstance(r, Ranking)] == [0.1, 0.2, 0.3, 0.4, 0.6, 0.7]
    assert isinstance(results[4], InputError)
    assert heads.seen == [["rank 0.1", "rank 0.6"], ["rank 0.4"]]
    assert icr.seen == [["rank 0.3"]]
    assert bm25.seen == ["rank 0.2", "rank 0.7"]


def test_no_jobs_have_no_results():
    assert engine_of(heads=Sharing()).rank_many([]) == []


@pytest.mark.parametrize("verb", ["bug", "refuse"])
def test_a_shared_pass_that_fails_is_tried_job_by_job_and_only_once(verb):
    heads, bm25 = Sharing(), Alone()
    jobs = [job("one"), job(verb), job("other", "bm25"), job("two")]
    results = engine_of(heads=heads, bm25=bm25).rank_many(jobs)
    kind = "InternalError" if verb == "bug" else "InputError"
    assert kinds(results) == ["Ranking", kind, "Ranking", "Ranking"]
    assert heads.seen == [["one", verb, "two"], ["one"], [verb], ["two"]]
    assert bm25.seen == ["other"]


def test_an_unforeseen_error_tells_the_log_where_and_the_caller_nothing(caplog):
    [result] = engine_of(heads=Sharing()).rank_many([job("bug SECRET")])
    assert isinstance(result, InternalError)
    assert "about" not in str(result) + caplog.text
    assert "id-bug" in caplog.text
    assert "ValueError at" in caplog.text
    assert "test_engine.py" in caplog.text


def test_a_failed_device_computes_nothing_more():
    heads, icr, bm25 = Sharing(), Sharing(), Alone()
    jobs = [job("before", "bm25"), job("one"), job("device"), job("after", "icr")]
    results = engine_of(heads=heads, icr=icr, bm25=bm25).rank_many(jobs)
    assert kinds(results) == ["Ranking", "DeviceLost", "DeviceLost", "DeviceLost"]
    assert heads.seen == [["one", "device"]]
    assert icr.seen == []


def test_a_device_that_fails_while_jobs_are_tried_alone_ends_the_trial():
    tried = []

    def rank(jobs):
        tried.append([each.query for each in jobs])
        if len(jobs) > 1:
            raise ValueError
        return [result_of(jobs[0].query)]

    results = isolated(rank, [job("one"), job("device"), job("two")])
    assert kinds(results) == ["Ranking", "DeviceLost", "DeviceLost"]
    assert tried == [["one", "device", "two"], ["one"], ["device"]]
    assert isinstance(results[1], DeviceLost)


@pytest.mark.parametrize("query", ["rank nan", "rank inf", "rank -inf", "raw 0.5"])
@pytest.mark.parametrize("reranker", [Alone, Sharing])
def test_score_that_is_no_number_is_an_error_of_its_job_only(query, reranker):
    results = engine_of(heads=reranker()).rank_many([job("one"), job(query)])
    assert kinds(results) == ["Ranking", "NonFiniteScore"]
    assert isinstance(results[1], NonFiniteScore)


def test_counts_of_the_cache_are_handed_through():
    assert engine_of().cache == CacheCounts()
    assert RerankEngine(INFO, None, lambda: CacheCounts(hits=3)).cache.hits == 3
