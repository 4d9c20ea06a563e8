"""Loads what the settings name: model, bank, and the methods over them. Importing this loads no model library."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from headbank.errors import BankError, InputError
from headbank.rerankers.base import Reranker
from headbank.types import RankOptions
from service.engine import CacheCounts, Engine, EngineInfo, Job, RerankEngine
from service.settings import Settings

if TYPE_CHECKING:
    from headbank.models.base import HeadRunner
    from service.methods import Methods

_log = logging.getLogger("headrank.engine")

_EXAMPLE_QUERY = "What is the capital of France?"
_EXAMPLE_DOCUMENTS = (
    "Berlin is a large city in Germany.",
    "The capital of France is Paris.",
    "Bananas grow in warm countries.",
)
_EXAMPLE_ANSWER = 1


def load_engine(settings: Settings) -> Engine:
    """Load the model and its bank. Raises ModelError, BankError, and InputError for a setting."""
    from headbank.rerankers.heads import open_bank
    from service.methods import Methods

    runner, device = _load_runner(settings)
    bank = open_bank(settings.bank, runner.info)
    methods = Methods(runner, bank, settings, lambda model: _load_dense(model, settings))
    _check_defaults(methods, settings)
    info = EngineInfo(
        model=runner.info,
        device="cpu" if device == "cpu" else "gpu",
        head_sets=methods.head_sets(),
        defaults=methods.defaults,
        methods=methods.names,
    )
    if settings.warm_up:
        _warm_up(methods)
    return RerankEngine(info, methods.choose, lambda: _cache_counts(runner))


def _load_runner(settings: Settings) -> "tuple[HeadRunner, str]":
    """The model and the device it is on."""
    from headbank.models.fake import FAKE_MODEL, FakeRunner

    if settings.model == FAKE_MODEL:
        # Not by way of `headbank.models.loading`, which spends seconds on importing the library of real
        # models.
        return FakeRunner(), "cpu"
    from headbank.models.loading import default_device, load_runner

    def load(max_layers: int | None) -> "HeadRunner":
        return load_runner(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            max_layers=max_layers,
            cache_bytes=settings.document_cache_bytes,
            host_cache_bytes=settings.host_cache_bytes,
        )

    device = default_device() if settings.device == "auto" else settings.device
    n_layers = _needed_layers(settings)
    try:
        return load(n_layers), device
    except InputError as error:
        if error.field != "max_layers":
            raise
    # More layers than the model has: the bank is of another one, which its check says better.
    return load(None), device


def _needed_layers(settings: Settings) -> int | None:
    """How many layers the bank's heads need; None for all, also where the bank cannot be told before the model.

    That is where neither `settings.bank` is the bank itself nor its folder has the name of the model.
    """
    if settings.views != "query":
        return None
    from headbank.bank import MANIFEST, read, shipped_root, slug
    from service.methods import deepest_layer

    root: Path = settings.bank or shipped_root()
    for folder in (root, root / slug(settings.model.removesuffix(".gguf"))):
        if (folder / MANIFEST).is_file():
            deepest = deepest_layer(read(folder), "query")
            return None if deepest is None else deepest + 1
    _log.warning("no head bank goes by the name of the model: all layers are loaded")
    return None


def _check_defaults(methods: "Methods", settings: Settings) -> None:
    if settings.default_view not in methods.defaults:
        has = ", ".join(methods.defaults) or "none"
        raise BankError(
            f"the head bank has no default heads for the default_view {settings.default_view}; it has: {has}"
        )
    if settings.default_method not in methods.names:
        raise InputError(
            "default_method", f"the head bank does not serve it, only {', '.join(methods.names)}"
        )


def _cache_counts(runner: "HeadRunner") -> CacheCounts:
    documents = getattr(runner, "documents", None)
    if documents is None:
        return CacheCounts()
    counts = documents.counts
    return CacheCounts(counts.hits, counts.misses, counts.device_bytes, counts.host_bytes, counts.documents)


def _load_dense(model: str, settings: Settings) -> Reranker:
    from headbank.rerankers.dense import Dense

    # A download would keep every other request waiting.
    return Dense(model, device=None if settings.device == "auto" else settings.device, local_files_only=True)


def _warm_up(methods: "Methods") -> None:
    """Rank an example with a known answer: what loads late is loaded, and a broken setup shows."""
    for view in methods.defaults:
        job = Job("warm-up", "heads", _EXAMPLE_QUERY, _EXAMPLE_DOCUMENTS, RankOptions(view=view))
        ranking = methods.choose(job).rank(job.query, job.documents, job.options)
        if ranking.order[0] != _EXAMPLE_ANSWER:
            _log.warning(
                "view %s ranks document %d of the warm-up example first, not %d: do model and bank fit?",
                view,
                ranking.order[0],
                _EXAMPLE_ANSWER,
            )
