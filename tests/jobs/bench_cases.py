"""A small stage for the bench, and how one contestant runs on it."""

from typing import Any

from headbank.jobs.bench import BenchConfig, make_texts
from headbank.jobs.bench_contestants import (
    CONTESTANTS,
    Case,
    Outcome,
    Stage,
    open_stage,
)
from headbank.types import HeadId
from tests.support.tiny_models import tiny_runner

HEADS = (HeadId(0, 1), HeadId(1, 3))


def stage_of(family: str = "llama", max_bytes: int = 1 << 30) -> Stage:
    return open_stage(tiny_runner(family), HEADS, response_tokens=3, max_bytes=max_bytes)


def small(*documents: int, **changes: Any) -> BenchConfig:
    return BenchConfig(documents, **{"document_tokens": 10, "query_tokens": 5, "rounds": 2, **changes})


def a_case(stage: Stage, n: int = 4) -> Case:
    documents, queries = make_texts(stage.runner.prompts, small(n))
    return Case(stage, queries[0], tuple(documents))


def run(name: str, case: Case) -> Outcome:
    contestant = CONTESTANTS[name]
    prepared = contestant.prepare(case)
    with case.stage.plain.attention(contestant.attention):
        return prepared.run()
