"""The service's engine over a tiny random model; importable in the child process."""

from dataclasses import replace

from headbank.bank import Bank
from headbank.models.cache import DocumentCache
from headbank.models.hf import HFRunner
from headbank.rerankers.bm25 import BM25
from headbank.types import LAYOUTS, VIEWS, Fusion, HeadId, HeadSet, PromptStyle
from service.engine import CacheCounts, EngineInfo, RerankEngine
from service.methods import Methods
from service.settings import Settings
from tests.support.banks import bank_of_sets
from tests.support.tiny_models import tiny_model, tiny_tokenizer

HEADS = (HeadId(0, 1), HeadId(1, 2), HeadId(1, 0), HeadId(2, 3))


def tiny_bank(info) -> Bank:
    """Heads that vote by evidence in every view and layout, and a fusion of each with BM25."""
    sets = [
        HeadSet(
            f"expert.{view}.{layout}", "expert", view, HEADS, "evidence", PromptStyle(layout),
            z_mean=(-3.0, -2.5, -3.5, -4.0), z_std=(1.0, 0.5, 2.0, 0.8), platt=(0.7, 0.1), response_tokens=4,
        )
        for view in VIEWS
        for layout in LAYOUTS
    ]  # fmt: skip
    fusions = [
        Fusion(
            heads.name.replace("expert", "fusion"), heads.name, ("bm25",), "",
            (0.0, 2.0), (1.0, 3.0), (0.8, 0.3), (1.0, 0.0),
        )
        for heads in sets
    ]  # fmt: skip
    return replace(bank_of_sets(info, sets), fusions={fusion.name: fusion for fusion in fusions})


def load_tiny(settings: Settings) -> RerankEngine:
    """The engine; `document_cache_bytes` is as the settings say."""
    cache = DocumentCache(settings.document_cache_bytes)
    runner = HFRunner(tiny_model("llama"), tiny_tokenizer(), model_id="tiny-llama", documents=cache)
    methods = Methods(runner, tiny_bank(runner.info), settings, lambda model: BM25())
    info = EngineInfo(runner.info, "cpu", methods.head_sets(), methods.defaults, methods.names)

    def counts() -> CacheCounts:
        found = cache.counts
        return CacheCounts(found.hits, found.misses, found.device_bytes, found.host_bytes, found.documents)

    return RerankEngine(info, methods.choose, counts)
