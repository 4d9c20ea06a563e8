"""Prometheus metrics of one app. Labels come from the code, never from requests."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headbank.types import Ranking
from service.dialects import RerankCall
from service.worker import Worker

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class DocumentCacheCollector(Collector):
    """The engine's cache of documents, as its last answer told."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """What Prometheus reads."""
        counts, name = self._worker.cache, "headrank_document_cache"
        yield CounterMetricFamily(f"{name}_hits", "Documents found in the cache", counts.hits)
        yield CounterMetricFamily(f"{name}_misses", "Documents not found in the cache", counts.misses)
        size = GaugeMetricFamily(f"{name}_bytes", "Size of what the cache holds", labels=["tier"])
        size.add_metric(["device"], counts.device_bytes)
        size.add_metric(["host"], counts.host_bytes)
        yield size
        yield GaugeMetricFamily(f"{name}_documents", "Documents in the cache", counts.documents)


class Metrics:
    """The counters of one app, in a registry of their own."""

    def __init__(self, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "headrank_requests", "Rerank requests answered", ["dialect", "status"], registry=self.registry
        )
        self._errors = Counter("headrank_errors", "Errors by class", ["error"], registry=self.registry)
        self._gone = Counter(
            "headrank_disconnects", "Requests whose client left before the answer", registry=self.registry
        )
        self._seconds = Histogram(
            "headrank_request_seconds",
            "From the first byte of a request to its answer",
            ["dialect"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._stages = Histogram(
            "headrank_stage_seconds",
            "Parts of a ranking: queue, tokenise, forward, vote",
            ["method", "stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._documents = Counter(
            "headrank_documents", "Documents ranked", ["method"], registry=self.registry
        )
        self._cut = Counter(
            "headrank_documents_cut", "Documents cut to the token limit", ["method"], registry=self.registry
        )
        self._tokens = Counter("headrank_input_tokens", "Tokens read", ["method"], registry=self.registry)
        self._batch_requests = Histogram(
            "headrank_batch_requests",
            "Requests answered together",
            buckets=_REQUESTS,
            registry=self.registry,
        )
        self._batch_tokens = Histogram(
            "headrank_batch_tokens",
            "Estimated tokens of requests answered together",
            buckets=_TOKENS,
            registry=self.registry,
        )
        self.registry.register(DocumentCacheCollector(worker))
        worker.on_batch = self.batched
        for name, text, read in (
            ("headrank_queue_waiting", "Requests in the queue", lambda: worker.waiting),
            ("headrank_ready", "1 while requests are answered", lambda: worker.state == "ready"),
            ("headrank_engine_restarts", "Restarts of the engine process", lambda: worker.restarts),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    def answered(self, dialect: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(dialect, str(status)).inc()
        self._seconds.labels(dialect).observe(seconds)

    def ranked(self, call: RerankCall, ranking: Ranking) -> None:
        """Count the work of a ranking."""
        self._documents.labels(call.method).inc(len(call.documents))
        self._cut.labels(call.method).inc(len(ranking.cut))
        self._tokens.labels(call.method).inc(ranking.input_tokens)
        for stage, seconds in ranking.seconds.items():
            self._stages.labels(call.method, stage).observe(seconds)

    def batched(self, requests: int, tokens: int) -> None:
        """Count a batch on its way to the engine."""
        self._batch_requests.observe(requests)
        self._batch_tokens.observe(tokens)

    def failed(self, error: Exception) -> None:
        """Count an error."""
        self._errors.labels(type(error).__name__).inc()

    def disconnected(self) -> None:
        """Count a client that left."""
        self._gone.inc()

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
