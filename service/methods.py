"""Which reranker answers a job, and which jobs none can answer."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from headbank.bank import Bank
from headbank.errors import BankError, InputError, ModelError
from headbank.models.base import HeadRunner
from headbank.rerankers.base import Reranker
from headbank.rerankers.bm25 import BM25
from headbank.rerankers.fusion import FusionReranker
from headbank.rerankers.heads import HeadReranker
from headbank.rerankers.llm import ListwiseLLM
from headbank.types import LAYOUTS, VIEWS, Fusion, HeadSet, Layout, Ranking, RankOptions, View
from service.engine import Job
from service.settings import WHOLE_MODEL_METHODS, Method, Settings

LOAD_RETRY_S = 60.0
"""After a failed load of a dense model, requests for it fail at once for so long: loading blocks others."""


class LazyReranker:
    """A reranker that is loaded at its first use."""

    def __init__(self, name: str, load: Callable[[], Reranker]) -> None:
        self.name = name
        self._load = load
        self._loaded: Reranker | None = None
        self._failure: tuple[float, ModelError] | None = None

    def loaded(self) -> Reranker:
        """The reranker. Raises ModelError when it cannot be loaded, or could not be some seconds ago."""
        if self._loaded is None:
            if self._failure is not None and time.monotonic() - self._failure[0] < LOAD_RETRY_S:
                raise self._failure[1]
            try:
                self._loaded = self._load()
            except ModelError as error:
                self._failure = (time.monotonic(), error)
                raise
        return self._loaded

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        """Rank (see `headbank.rerankers.base.Reranker.rank`). Raises ModelError as `loaded` does."""
        return self.loaded().rank(query, documents, options)


class Methods:
    """The methods over one model and its bank."""

    def __init__(
        self, runner: HeadRunner, bank: Bank, settings: Settings, load_dense: Callable[[str], Reranker]
    ) -> None:
        """`load_dense` loads an embedding model by name. Raises BankMismatch for a bank of another model."""
        self._bank = bank
        self._whole = settings.views == "both"
        self._views: tuple[View, ...] = VIEWS if self._whole else ("query",)
        self._load_dense = load_dense
        self._dense: dict[str, LazyReranker] = {}
        self._heads = HeadReranker(runner, bank, response_tokens=settings.response_tokens)
        self._plain: dict[Method, Reranker] = {
            "heads": self._heads,
            "icr": HeadReranker(runner, None, detector="icr", name="icr"),
            "llm": ListwiseLLM(runner),
            "bm25": BM25(),
            "dense": self._dense_voter(settings.dense_model),
        }
        self._fusions = {
            name: FusionReranker(self._heads, bank, self._voters(fusion))
            for name, fusion in bank.fusions.items()
            if bank.head_sets[fusion.head_set].view in self._views
        }

    @property
    def names(self) -> tuple[Method, ...]:
        """The methods that requests can choose."""
        missing = set() if self._whole else {*WHOLE_MODEL_METHODS}
        if not self._fusions:
            missing.add("fusion")
        return tuple(method for method in get_args(Method) if method not in missing)

    @property
    def defaults(self) -> dict[View, str]:
        """Per view, the name of the head set that votes where a request names no layout."""
        return {view: self._bank.defaults[view] for view in self._views if view in self._bank.defaults}

    def head_sets(self) -> tuple[HeadSet, ...]:
        """The head sets that requests can choose, those of a view together, its default first."""
        return head_sets(self._bank, self._views)

    def choose(self, job: Job) -> Reranker:
        """The reranker of a job.

        Raises InputError that names the field which asks for something that is not there, ModelError when a fusion's
        embedding model cannot be loaded.
        """
        method, options = job.method, job.options
        if method in WHOLE_MODEL_METHODS and not self._whole:
            raise InputError("method", f"{method} is not served, it needs all layers (setting views)")
        if method == "heads":
            sets = {s.style.layout: s for s in self.head_sets() if s.view == options.view}
            self._check_place(options, sets, "heads")
            self._check_rule(options, self._heads.head_set(options))
        elif method == "icr" and options.aggregation == "evidence":
            raise InputError("aggregation", "evidence was not fitted for the method icr")
        elif method == "fusion":
            return self._fusion(options)
        return self._plain[method]

    def _fusion(self, options: RankOptions) -> Reranker:
        if not self._fusions:
            raise InputError("method", "the head bank has no fusion; /info lists the methods there are")
        sets = [self._bank.head_sets[self._bank.fusions[name].head_set] for name in self._fusions]
        self._check_place(options, {s.style.layout: s for s in sets if s.view == options.view}, "fusion")
        try:
            fusion = self._bank.fusion(options.view, options.layout)
        except BankError as error:
            raise InputError("layout", "must be given: the head bank has no default for this view") from error
        if fusion.dense_model:
            # Before the heads are read: nothing of a request whose voter is missing can be used.
            self._dense_voter(fusion.dense_model).loaded()
        return self._fusions[fusion.name]

    def _check_place(self, options: RankOptions, sets: Mapping[Layout, HeadSet], what: str) -> None:
        """Raise InputError where no head set of the view, or of the layout asked for, is served for a method."""
        if options.view not in self._views:
            raise InputError("view", f"{options.view} is not served (setting views)")
        if not sets:
            raise InputError("view", f"the head bank has no {what} for the view {options.view}")
        if options.layout is not None and options.layout not in sets:
            has = ", ".join(layout for layout in LAYOUTS if layout in sets)
            raise InputError(
                "layout",
                f"the head bank has no {what} for the view {options.view} in {options.layout}, only in {has}",
            )

    def _check_rule(self, options: RankOptions, heads: HeadSet) -> None:
        if options.aggregation == "evidence" and not heads.z_mean:
            raise InputError("aggregation", f"evidence was not fitted for the head set {heads.name}")

    def _voters(self, fusion: Fusion) -> dict[str, Reranker]:
        voters: dict[str, Reranker] = {"bm25": BM25()}
        if fusion.dense_model:
            voters["dense"] = self._dense_voter(fusion.dense_model)
        return voters

    def _dense_voter(self, model: str) -> LazyReranker:
        if model not in self._dense:
            self._dense[model] = LazyReranker("dense", lambda: self._load_dense(model))
        return self._dense[model]


def head_sets(bank: Bank, views: Sequence[View]) -> tuple[HeadSet, ...]:
    """The head sets that method `heads` can vote with: the detector of a view's default, in every layout it has."""
    found: list[HeadSet] = []
    for view in views:
        default = bank.head_sets.get(bank.defaults.get(view, ""))
        if default is None:
            continue
        others = [
            heads
            for heads in bank.head_sets.values()
            if (heads.view, heads.detector) == (view, default.detector) and heads.name != default.name
        ]
        found += [default, *others]
    return tuple(found)


def deepest_layer(bank: Bank, view: View) -> int | None:
    """The deepest layer of a head that votes in a view, by itself or in a fusion; None when none does."""
    voting = [*head_sets(bank, (view,))]
    voting += [bank.head_sets[fusion.head_set] for fusion in bank.fusions.values()]
    return max((head.layer for s in voting if s.view == view for head in s.heads), default=None)
