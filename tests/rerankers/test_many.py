"""`rank_many` ranks as `rank` does, one by one, and an error stays where it belongs."""

import math

import pytest

from headbank.errors import BankError, HeadRankError, InputError, InputTooLong, NonFiniteScore
from headbank.models.fake import FakeRunner
from headbank.rerankers.base import Task
from headbank.rerankers.heads import HeadReranker
from headbank.types import AGGREGATIONS, JOINT, LAYOUTS, VIEWS, HeadId, PromptStyle, Ranking, RankOptions
from tests.rerankers.helpers import BARE, DOCUMENTS, PARALLEL, QUERY, Recording, assert_alike, fitted
from tests.rerankers.test_heads import Broken
from tests.support.banks import bank_of_sets
from tests.support.tiny_models import tiny_runner

LONG_QUERY = "why " * 600


def mixed_tasks() -> list[Task]:
    """Every view, layout and rule over documents that overlap, and what is wrong or empty between them."""
    sets = [DOCUMENTS, (*DOCUMENTS[::-1], "", DOCUMENTS[0]), DOCUMENTS[1:]]
    tasks = []
    for view in VIEWS:
        for layout in LAYOUTS:
            for turn, rule in enumerate(AGGREGATIONS):
                if (view, rule) == ("response", "calibrated"):
                    continue
                options = RankOptions(view, rule, layout, 9 if turn == 1 else None, explain=turn % 2 == 0)
                tasks.append(Task(QUERY if turn < 3 else "Who bakes?", sets[turn % 3], options))
    tasks.insert(3, Task(LONG_QUERY, DOCUMENTS, RankOptions()))
    tasks.insert(7, Task(QUERY, (), RankOptions()))
    tasks.insert(8, Task(LONG_QUERY, (), RankOptions()))
    tasks.insert(9, Task(QUERY, DOCUMENTS, RankOptions("response", "calibrated")))
    tasks.insert(11, Task(QUERY, (DOCUMENTS[0], "word and " * 2000), RankOptions(layout="parallel")))
    return tasks


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("far", [PARALLEL, BARE], ids=str)
def test_together_as_one_by_one(far: PromptStyle, backwards: bool) -> None:
    runner = tiny_runner("llama")
    bank = bank_of_sets(
        runner.info, [fitted(view=view, style=style) for style in (JOINT, far) for view in VIEWS]
    )
    tasks = mixed_tasks()[:: -1 if backwards else 1]
    together = HeadReranker(runner, bank).rank_many(tasks)
    assert len(together) == len(tasks)
    alone = HeadReranker(runner, bank)
    kinds = []
    for task, found in zip(tasks, together, strict=True):
        if isinstance(found, HeadRankError):
            kinds.append(type(found))
            with pytest.raises(type(found)) as caught:
                alone.rank(task.query, task.documents, task.options)
            assert str(caught.value) == str(found)
        else:
            assert_alike(found, alone.rank(task.query, task.documents, task.options))
    expected = [InputTooLong, InputTooLong, InputError, InputTooLong]
    assert kinds == expected[:: -1 if backwards else 1]


def test_all_prompts_go_in_one_call() -> None:
    class Counting(Recording):
        calls = 0

        def capture_many(self, requests):  # type: ignore[no-untyped-def]
            self.calls += 1
            return super().capture_many(requests)

    runner = Counting(tiny_runner("llama"))
    bank = bank_of_sets(runner.info, [fitted(view=v, style=s) for s in (JOINT, PARALLEL) for v in VIEWS])
    HeadReranker(runner, bank).rank_many(mixed_tasks())
    assert runner.calls == 1


def test_nothing_gives_nothing() -> None:
    runner = tiny_runner("llama")
    assert HeadReranker(runner, bank_of_sets(runner.info, [fitted()])).rank_many([]) == []


def test_a_layout_that_the_bank_lacks_harms_no_other_task() -> None:
    runner = FakeRunner()
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted((HeadId(2, 1),))]))
    good = Task(QUERY, DOCUMENTS, RankOptions())
    bad = Task(QUERY, DOCUMENTS, RankOptions(layout="parallel"))
    first, error, last = reranker.rank_many([good, bad, good])
    assert isinstance(error, BankError)
    assert isinstance(first, Ranking)
    assert isinstance(last, Ranking)
    assert first.scores == last.scores == reranker.rank(QUERY, DOCUMENTS, RankOptions()).scores


def test_a_task_with_broken_attention_harms_no_other_task() -> None:
    runner = Broken(math.nan, "Who bakes?")
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted((HeadId(2, 1),))]))
    tasks = [Task(query, DOCUMENTS, RankOptions()) for query in (QUERY, "Who bakes?", "falcon")]
    first, error, last = reranker.rank_many(tasks)
    assert isinstance(error, NonFiniteScore)
    assert isinstance(first, Ranking)
    assert isinstance(last, Ranking)
    assert first.order[0] == last.order[0] == 1
