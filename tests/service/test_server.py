"""A real server with a real engine process: client libraries, load, clients that leave, a killed engine."""

import json
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cohere
import httpx
import pytest

from service.loading import load_engine
from service.settings import Settings
from tests.service.conftest import live_server

QUERY = "capital of France"
HEAD = b"POST /v2/rerank HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
DOCUMENTS = ["Berlin is in Germany.", "The capital of France is Paris.", "France is large."]


@pytest.fixture(scope="module")
def fake_server():
    """The service as users get it: fake model, real child process, a key."""
    with live_server(Settings(model="fake", api_keys="secret", max_documents=2000), load_engine) as live:
        yield live


@pytest.fixture
def cohere_client(fake_server):
    """Makes clients of Cohere's own library."""
    with httpx.Client() as transport:
        yield lambda kind=cohere.ClientV2, key="secret", **options: kind(
            key, base_url=fake_server.url, httpx_client=transport, **options
        )


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("engine") / "log"


@pytest.fixture(scope="module")
def server(log):
    """Engine that obeys the query, one request at a time; at most 4 requests wait."""
    with live_server(
        Settings(model="scripted", queue_requests=4, bank=log, max_body_bytes=1_000_000, batch_tokens=1)
    ) as live:
        yield live


def post(server, query, documents=("a", "bbb", "cc"), **options):
    body = {"query": query, "documents": list(documents)}
    return httpx.post(f"{server.url}/v2/rerank", json=body, timeout=30, **options)


def when_computed(log, query):
    end = time.monotonic() + 10
    while not log.exists() or query not in log.read_text().splitlines():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_cohere_client_v2(cohere_client):
    client = cohere_client(client_name="test")
    response = client.rerank(model="rerank-v3.5", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [(r.index, r.relevance_score) for r in response.results] == [(1, 1.0), (2, 0.5)]
    assert response.id
    assert response.meta.api_version.version == "2"
    assert response.meta.tokens.input_tokens == 37
    assert response.meta.billed_units.search_units == 1
    nulls = client.rerank(
        model="m", query=QUERY, documents=DOCUMENTS, top_n=None, max_tokens_per_doc=None, priority=1
    )
    assert [r.index for r in nulls.results] == [1, 2, 0]


def test_cohere_client_v1(cohere_client):
    client = cohere_client(cohere.Client)
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1], "page": "7"}, {"text": DOCUMENTS[2]}]
    response = client.rerank(query=QUERY, documents=documents, return_documents=True, max_chunks_per_doc=10)
    assert [(r.index, r.document.text) for r in response.results] == [(i, DOCUMENTS[i]) for i in (1, 2, 0)]
    assert response.meta.api_version.version == "1"
    plain = client.rerank(query=QUERY, documents=documents, rank_fields=["text"], model="any")
    assert [r.document for r in plain.results] == [None] * 3


@pytest.mark.parametrize(
    ("key", "documents", "options", "error"),
    [
        ("wrong", DOCUMENTS, {}, cohere.UnauthorizedError),
        ("secret", [], {}, cohere.BadRequestError),
        ("secret", DOCUMENTS, {"top_n": 0}, cohere.UnprocessableEntityError),
    ],
)
def test_cohere_client_errors(cohere_client, key, documents, options, error):
    client = cohere_client(key=key)
    with pytest.raises(error) as raised:
        client.rerank(model="m", query=QUERY, documents=documents, **options)
    assert raised.value.body["message"] == raised.value.body["detail"]


def test_tei_call(fake_server):
    headers = {"authorization": "Bearer secret"}
    body = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": False, "return_text": True, "truncate": True}
    response = httpx.post(f"{fake_server.url}/rerank", json=body, headers=headers)
    assert [(r["index"], r["text"]) for r in response.json()] == [(i, DOCUMENTS[i]) for i in (1, 2, 0)]
    assert int(response.headers["x-total-time"]) >= int(response.headers["x-inference-time"])


def test_context_that_overflows_is_the_callers_error_and_harms_nobody(cohere_client):
    client = cohere_client()
    with pytest.raises(cohere.core.ApiError) as raised:
        client.rerank(model="m", query="word " * 3000, documents=DOCUMENTS)
    assert raised.value.status_code == 413
    assert raised.value.body["error"]["param"] == "query"
    assert client.rerank(model="m", query=QUERY, documents=DOCUMENTS).results[0].index == 1


def test_twenty_at_once_all_get_their_own_answer(cohere_client):
    client = cohere_client()

    def ask(number):
        documents = [f"filler {i}" for i in range(20)]
        documents[number] = "the capital of France"
        return client.rerank(model="m", query=QUERY, documents=documents, top_n=1).results[0].index

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(ask, range(20))) == list(range(20))


def test_health_stays_fast_while_the_engine_works(server):
    with ThreadPoolExecutor(4) as pool, httpx.Client() as client:
        slow = [pool.submit(post, server, f"sleep 0.4 {i}") for i in range(4)]
        seconds = []
        while not all(future.done() for future in slow):
            started = time.perf_counter()
            assert client.get(f"{server.url}/health").json() == {"status": "ok"}
            assert client.get(f"{server.url}/readyz").status_code == 200
            seconds.append(time.perf_counter() - started)
            time.sleep(0.01)
        assert [future.result().status_code for future in slow] == [200] * 4
    assert len(seconds) > 20
    assert statistics.median(seconds) < 0.1
    assert max(seconds) < 0.35


def test_full_queue_is_429_with_retry_after_and_health_is_still_there(server):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: post(server, f"sleep 0.2 full {i}"), range(8)))
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] * 5 + [429] * 3
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "overloaded_error"
    assert post(server, "plain").status_code == 200


def test_client_that_left_is_never_computed(server, log):
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, server, "sleep 0.4 before")
        when_computed(log, "sleep 0.4 before")
        body = json.dumps({"query": "left", "documents": ["a"]}).encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
            connection.sendall(HEAD % len(body) + body)
            end = time.monotonic() + 5
            while server.worker.waiting == 0:
                assert time.monotonic() < end
                time.sleep(0.005)
        while server.worker.waiting == 1:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert slow.result().status_code == 200
    assert post(server, "after").status_code == 200
    assert "left" not in log.read_text().splitlines()
    assert "headrank_disconnects_total 1.0" in httpx.get(f"{server.url}/metrics").text


def test_client_that_leaves_in_the_middle_of_its_body_is_no_error(server):
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(HEAD % 99 + b"{")
    assert post(server, "plain").status_code == 200


def test_large_bodies(server):
    assert post(server, "plain", ["x" * 20_000] * 40).status_code == 200
    response = post(server, "plain", ["x" * 20_000] * 100)
    assert response.status_code == 413
    assert response.json()["message"] == "body: must not be larger than 1000000 bytes"


def test_killed_engine_is_503_for_its_request_then_red_then_green(server):
    answer = post(server, "die")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["type"] == "unavailable_error"
    ready = httpx.get(f"{server.url}/readyz")
    assert ready.status_code == 503
    assert ready.json()["state"] == "restarting"
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert post(server, "plain").status_code == 503
    server.wait("ready")
    assert httpx.get(f"{server.url}/readyz").json() == {"ready": True, "state": "ready", "reason": ""}
    assert post(server, "plain").status_code == 200
    assert "headrank_engine_restarts 1.0" in httpx.get(f"{server.url}/metrics").text


def test_an_engine_told_to_end_answers_its_request_first(server):
    before = server.worker.restarts
    assert post(server, "term").status_code == 200
    until_restarted(server, before)
    assert post(server, "plain").status_code == 200


def test_a_failed_device_is_503_and_a_new_engine(server):
    before = server.worker.restarts
    answer = post(server, "device")
    assert answer.status_code == 503
    assert "illegal" not in answer.text
    until_restarted(server, before)
    assert post(server, "plain").status_code == 200


def until_restarted(server, before):
    end = time.monotonic() + 30
    while server.worker.restarts == before or server.worker.state != "ready":
        assert time.monotonic() < end
        time.sleep(0.01)


def test_shutdown_lets_running_requests_finish(tmp_path):
    answers = []
    with live_server(Settings(model="scripted", bank=tmp_path / "log")) as live:
        thread = threading.Thread(target=lambda: answers.append(post(live, "sleep 0.5")))
        thread.start()
        when_computed(tmp_path / "log", "sleep 0.5")
    thread.join()
    assert [answer.status_code for answer in answers] == [200]
