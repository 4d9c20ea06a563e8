"""Bench: how long contestants take for the same documents, and the ratios of these times.

Contestants take turns, so that a machine that slows down slows all of them; a ratio is taken within a round, and the
median over rounds is reported.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headbank.errors import InputError, InputTooLong, NonFiniteScore
from headbank.jobs.bench_contestants import CONTESTANTS, Case, Contestant, Outcome, Prepared, Skip, Stage
from headbank.models.base import Prompts

OURS = ("heads_joint_cold", "heads_parallel_cold", "heads_parallel_warm")
OTHERS = ("icr", "icr_two_pass", "eager", "pointwise")
RATIOS = (
    *((other, ours) for ours in OURS for other in OTHERS),
    ("heads_parallel_cold", "heads_parallel_warm"),
)
"""Reported as `a / b`: how many times longer a takes than b."""

GROWTH = (100, 1000)
"""Numbers of documents whose times are compared, per contestant."""

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    documents: tuple[int, ...]
    """Numbers of documents D, one case each."""
    document_tokens: int = 140
    """Mean length of a document; lengths go from half to one and a half of it."""
    query_tokens: int = 20
    rounds: int = 5
    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    seed: int = 0
    max_seconds_per_call: float | None = None
    """A contestant whose call is expected to take longer sits out that D; None: no limit."""


@dataclass(frozen=True)
class Measured:
    """One number of documents."""

    documents: int
    seconds: dict[str, list[float]]
    """Contestant -> one value per round."""
    outcomes: dict[str, list[Outcome]]
    skipped: dict[str, str]
    """Contestant -> why it sat out."""

    def ratios(self) -> dict[str, dict[str, float]]:
        """`a / b` -> spread over rounds, as far as both took part; `tap_overhead` is heads_joint_cold / floor - 1."""
        seconds = self.seconds
        found: dict[str, dict[str, float]] = {}
        if "floor" in seconds and "heads_joint_cold" in seconds:
            found["tap_overhead"] = spread(
                [ratio - 1 for ratio in _ratio(seconds["heads_joint_cold"], seconds["floor"])]
            )
        for a, b in RATIOS:
            if a in seconds and b in seconds:
                found[f"{a} / {b}"] = spread(_ratio(seconds[a], seconds[b]))
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values; of the cache, the hits and misses of all timed calls."""
        content: dict[str, Any] = {
            "documents": self.documents,
            "seconds": {name: spread(values) for name, values in self.seconds.items()},
            "ratios": self.ratios(),
            "skipped": self.skipped,
        }
        if "heads_parallel_warm" in self.outcomes:
            calls = self.outcomes["heads_parallel_warm"]
            content["cache"] = {"hits": sum(c.hits for c in calls), "misses": sum(c.misses for c in calls)}
        if "heads_response" in self.outcomes:
            written = [call.response_tokens for call in self.outcomes["heads_response"]]
            content["response_tokens"] = float(np.median(written))
        return content


@dataclass(frozen=True)
class BenchResult:
    """All numbers of documents, in ascending order."""

    cases: tuple[Measured, ...]

    def growth(self) -> dict[str, dict[str, float]]:
        """Contestant -> spread over rounds of time(1000) / time(100)."""
        few, many = (next((case.seconds for case in self.cases if case.documents == n), {}) for n in GROWTH)
        return {name: spread(_ratio(many[name], few[name])) for name in few if name in many}

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {
            "results": [case.to_json() for case in self.cases],
            "growth": {f"{GROWTH[1]} / {GROWTH[0]}": self.growth()},
        }


@dataclass
class _Clocked:
    """Calls of contestants, timed."""

    stage: Stage
    contestants: Mapping[str, Contestant]
    clock: Callable[[], float]
    documents: Sequence[str]
    first: dict[tuple[str, int], float] = field(default_factory=dict)
    """Seconds of the first call, by contestant and D."""

    def prepare(self, name: str, n: int, query: str) -> Prepared:
        return self.contestants[name].prepare(Case(self.stage, query, tuple(self.documents[:n])))

    def call(self, name: str, prepared: Prepared) -> tuple[float, Outcome]:
        """Seconds and outcome. Raises NonFiniteScore."""
        with self.stage.plain.attention(self.contestants[name].attention):
            self.stage.synchronize()
            started = self.clock()
            outcome = prepared.run()
            self.stage.synchronize()
            seconds = self.clock() - started
        if not bool(outcome.scores.isfinite().all()):
            raise NonFiniteScore(f"a score of the contestant {name} is not a finite number")
        return seconds, outcome

    def reason_to_skip(self, name: str, n: int, query: str, limit: float | None) -> str | None:
        """Warm a contestant up by one call; why it sits out, None when it takes part."""
        before = max((d for other, d in self.first if other == name), default=None)
        if limit is not None and before is not None:
            expected = self.first[name, before] * n / before
            if expected > limit:
                return f"a call would take {expected:.0f} s or more, the limit is {limit:g} s"
        try:
            self.first[name, n], _ = self.call(name, self.prepare(name, n, query))
        except (Skip, InputTooLong) as error:
            return str(error)
        except torch.OutOfMemoryError:
            return "the device's memory is too small"
        return None


def bench(
    stage: Stage,
    config: BenchConfig,
    *,
    contestants: Mapping[str, Contestant] = CONTESTANTS,
    clock: Callable[[], float] = time.perf_counter,
    on_call: Callable[[], None] = lambda: None,
) -> BenchResult:
    """Time contestants on generated documents.

    One call of each warms up, from few documents to many. Whoever cannot do a case, or would take longer than the
    limit (judged by the first call on fewer documents, in proportion to their number, which is too kind to costs
    that grow faster), sits it out. Then every round asks a new query of all cases and contestants in turn. `on_call`
    is called `calls(config)` times, after every call and every decision to sit out. Raises InputError for an empty
    choice or an unknown contestant, NonFiniteScore for broken scores.
    """
    check_config(config, contestants)
    sizes = sorted(set(config.documents))
    documents, queries = make_texts(stage.runner.prompts, config)
    clocked = _Clocked(stage, contestants, clock, documents)
    cases = [Measured(n, {}, {}, {}) for n in sizes]
    for case, name in _turns(cases, config):
        reason = clocked.reason_to_skip(name, case.documents, queries[0], config.max_seconds_per_call)
        if reason is None:
            case.seconds[name], case.outcomes[name] = [], []
        else:
            case.skipped[name] = reason
        on_call()
    for query in queries[1:]:
        for case, name in _turns(cases, config):
            if name in case.seconds:
                seconds, outcome = clocked.call(name, clocked.prepare(name, case.documents, query))
                case.seconds[name].append(seconds)
                case.outcomes[name].append(outcome)
            on_call()
    return BenchResult(tuple(cases))


def calls(config: BenchConfig) -> int:
    """How many turns a run has, those of the warm-up included."""
    return len(set(config.documents)) * len(config.contestants) * (config.rounds + 1)


def check_config(config: BenchConfig, contestants: Mapping[str, Contestant] = CONTESTANTS) -> None:
    """Raises InputError for a number below 1, an empty choice or an unknown contestant."""
    if not config.contestants or not set(config.contestants) <= set(contestants):
        raise InputError("contestants", f"must name at least one of {', '.join(contestants)}")
    if not config.documents or min(config.documents) < 1:
        raise InputError("documents", "must be whole numbers of at least 1", 1)
    for name in ("document_tokens", "query_tokens", "rounds"):
        if getattr(config, name) < 1:
            raise InputError(name, "must be at least 1", 1)


def make_texts(prompts: Prompts, config: BenchConfig) -> tuple[list[str], list[str]]:
    """Documents for the largest case, and `rounds + 1` queries, of made-up words; the same for the same seed.

    A text has the wanted number of tokens, or one or two less or more where a token spans its end.
    """
    chance = random.Random(config.seed)
    low, high = max(1, config.document_tokens // 2), config.document_tokens * 3 // 2
    documents = [
        _text(prompts, chance, chance.randint(low, max(low, high))) for _ in range(max(config.documents))
    ]
    return documents, [_text(prompts, chance, config.query_tokens) for _ in range(config.rounds + 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and the quartiles `low` and `high`."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def _ratio(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Round by round."""
    return [x / y for x, y in zip(a, b, strict=True)]


def _turns(cases: Sequence[Measured], config: BenchConfig) -> Iterator[tuple[Measured, str]]:
    return ((case, name) for case in cases for name in config.contestants)


def _text(prompts: Prompts, chance: random.Random, n_tokens: int) -> str:
    words = ["".join(chance.choice(_SYLLABLES) for _ in range(chance.randint(1, 3))) for _ in range(n_tokens)]
    text = " ".join(words)
    return text[: prompts.offsets(text, n_tokens)[-1][1]]
