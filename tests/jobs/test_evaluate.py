"""Evaluation: metrics per method on questions with a known answer, and what is left out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headbank.errors import InputError
from headbank.jobs.evaluate import Evaluation, Method, evaluate, paired, pooled
from headbank.models.base import Capture, CaptureRequest
from headbank.models.fake import FakeRunner
from headbank.rerankers.base import by_score
from headbank.rerankers.fusion import FusionReranker
from headbank.rerankers.heads import HeadReranker, icr_set, open_bank
from headbank.types import Document, Fusion, PromptStyle, Ranking, RankOptions, Sample, View


class Fixed:
    """Ranks documents by a number they carry."""

    def __init__(self, sign: float) -> None:
        self.sign = sign
        self.name = f"fixed {sign}"
        self.calls = 0

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        self.calls += 1
        scores = tuple(self.sign * float(document) for document in documents)
        return Ranking(scores, by_score(scores), self.name)


def question(id: str, relevance: Sequence[int]) -> Sample:
    documents = [Document(str(i), gold=r > 0, relevance=r) for i, r in enumerate(relevance)]
    return Sample(id, "question", tuple(documents))


def test_metrics_of_known_rankings() -> None:
    # Descending numbers put document 3 first. q1: golds 2, 3 -> P@2 1. q2: golds 0, 3 -> P@2 1/2, AP (1 + 2/4) / 2.
    samples = [question("q1", [0, 0, 1, 1]), question("q2", [1, 0, 0, 1])]
    down, up = Method("down", Fixed(1), RankOptions()), Method("up", Fixed(-1), RankOptions())
    result = evaluate([down, up], samples, latency_questions=0)
    assert result.questions == 2
    found = result.to_json()
    assert result.values["down"]["P@2"] == [1.0, 0.5]
    assert found["metrics"]["down"]["P@2"]["mean"] == pytest.approx(0.75)
    assert found["metrics"]["down"]["MAP"]["mean"] == pytest.approx((1 + 0.75) / 2)
    # Ascending: q1 ranks its golds third and fourth, AP (1/3 + 2/4) / 2.
    assert found["metrics"]["up"]["MAP"]["mean"] == pytest.approx(((1 / 3 + 1 / 2) / 2 + 0.75) / 2)
    assert (found["metrics"]["down"]["P@2"]["low"], found["metrics"]["down"]["P@2"]["high"]) == (0.5, 1.0)
    assert set(found["p_values"]) == {"down vs up"}
    assert result.latency_s == {}


def test_questions_with_one_kind_of_documents_are_left_out_for_all() -> None:
    samples = [question("none", [0, 0]), question("some", [0, 1]), question("all", [1, 2])]
    result = evaluate([Method("m", Fixed(1), RankOptions())], samples, latency_questions=0)
    assert result.questions == 1
    assert result.skipped == {"one_kind_of_documents": ["none", "all"]}


def test_no_question_left_is_an_error() -> None:
    with pytest.raises(InputError, match="data"):
        evaluate([Method("m", Fixed(1), RankOptions())], [question("none", [0, 0])])


def test_latency_is_timed_on_whole_calls_after_a_warm_up() -> None:
    reranker = Fixed(1)
    samples = [question(str(i), [0, 1]) for i in range(4)]
    result = evaluate([Method("m", reranker, RankOptions())], samples, latency_questions=3)
    # 4 for quality, 1 to warm up, 3 timed.
    assert reranker.calls == 8
    assert result.latency_s["m"]["questions"] == 3
    assert 0 < result.latency_s["m"]["median"] <= result.latency_s["m"]["high"]


class CountingRunner(FakeRunner):
    """Counts prompts that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def capture_many(self, requests: Sequence[CaptureRequest]) -> list[Capture]:
        self.read += len(requests)
        return super().capture_many(requests)


def words_sample(id: str = "w") -> Sample:
    documents = (
        Document("Rivers carry cold water to the sea."),
        Document("The falcon nests on the granite tower.", gold=True, relevance=1),
        Document("Bread is baked in the morning."),
    )
    return Sample(id, "Where does the falcon nest?", documents)


def on_heads(runner: FakeRunner, views: Sequence[View]) -> list[Method]:
    bank = open_bank(None, runner.info)
    reranker = HeadReranker(runner, bank)
    return [
        Method(f"heads ({view})", reranker, RankOptions(view=view), bank.head_set(view)) for view in views
    ]


def test_all_methods_on_heads_read_one_capture_and_a_second_run_reads_none(tmp_path: Path) -> None:
    runner = CountingRunner()
    methods = on_heads(runner, ("query", "response"))
    methods.append(
        Method("icr", methods[0].reranker, RankOptions(), icr_set(runner.info, PromptStyle("parallel")))
    )
    results = []
    for _ in range(2):
        results.append(
            evaluate(methods, [words_sample()], runner=runner, captures=tmp_path, k=1, latency_questions=0)
        )
        # The question and the content-free one, once.
        assert runner.read == 2
    assert results[0] == results[1]
    assert set(results[0].values) == {"heads (query)", "heads (response)", "icr"}
    assert results[0].values["heads (query)"]["P@1"] == [1.0]


@pytest.mark.parametrize("aggregation", ["borda", "share", "evidence", "calibrated"])
def test_captured_rankings_are_those_of_whole_requests(tmp_path: Path, aggregation: str) -> None:
    runner = FakeRunner()
    (method,) = on_heads(runner, ("query",))
    method = replace(method, aggregation=aggregation)  # type: ignore[arg-type]
    samples = [words_sample(), replace(words_sample("v"), question="Who bakes bread by the river?")]
    result = evaluate([method], samples, runner=runner, captures=tmp_path, k=1, latency_questions=0)
    for i, sample in enumerate(samples):
        options = RankOptions(aggregation=aggregation)  # type: ignore[arg-type]
        live = method.reranker.rank(sample.question, [d.content for d in sample.documents], options)
        assert result.values[method.label]["MRR"][i] == pytest.approx(1 / (1 + live.order.index(1)))


def test_fusion_weighs_the_voters_of_the_same_table(tmp_path: Path) -> None:
    runner = FakeRunner()
    bank = open_bank(None, runner.info)
    heads = bank.head_set("query")
    voter = Fixed(1)
    voter.name = "bm25"
    # All weight on the voter, which ranks by a number: the heads' gold, whose text is no number, cannot win.
    fusion = Fusion("fusion.query.parallel", heads.name, ("bm25",), "", (0, 0), (1, 1), (0, 1), (1.0, 0.0))
    reranker = HeadReranker(runner, bank)
    row = Method(
        "fusion", FusionReranker(reranker, bank, {"bm25": voter}), RankOptions(), heads, None, fusion
    )
    sample = question("q", [0, 1, 0, 0])
    result = evaluate(
        [row, Method("bm25", voter, RankOptions())],
        [sample],
        runner=runner,
        captures=tmp_path,
        k=1,
        latency_questions=0,
    )
    assert result.values["fusion"] == result.values["bm25"]
    assert voter.calls == 1
    # P(relevant) is the sigmoid of the number; the gold is document 1.
    p = torch.sigmoid(torch.arange(4, dtype=torch.float64))
    assert result.calibration_error["fusion"] == pytest.approx(_ece(p.tolist(), 1), abs=1e-12)


def _ece(probabilities: list[float], gold: int) -> float:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for i, p in enumerate(probabilities):
        bins.setdefault(int(p * 10), []).append((p, i == gold))
    return sum(abs(sum(y - p for p, y in rows)) for rows in bins.values()) / len(probabilities)


def test_a_question_too_long_for_the_model_is_left_out_for_every_method(tmp_path: Path) -> None:
    runner = FakeRunner()
    long = Sample("long", "falcon", (Document("word " * 9000, gold=True, relevance=1), Document("b")))
    methods = [*on_heads(runner, ("query",)), Method("length", ByLength(), RankOptions())]
    result = evaluate(methods, [long, words_sample()], runner=runner, captures=tmp_path, latency_questions=0)
    assert result.skipped == {"too_long": ["long"]}
    assert result.questions == 1


class ByLength:
    """Ranks longer documents first."""

    name = "length"

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        scores = tuple(float(len(document)) for document in documents)
        return Ranking(scores, by_score(scores), self.name)


def test_pooled_values_pair_what_all_files_have() -> None:
    def evaluation(**values: list[float]) -> Evaluation:
        n = len(next(iter(values.values())))
        return Evaluation(n, {}, {name: {"MAP": found} for name, found in values.items()}, {}, {})

    found = pooled([evaluation(a=[0.9, 0.8], b=[0.1, 0.2], c=[1, 1]), evaluation(a=[0.7] * 6, b=[0.3] * 6)])
    assert found == {"a": {"MAP": [0.9, 0.8, *[0.7] * 6]}, "b": {"MAP": [0.1, 0.2, *[0.3] * 6]}}
    # Eight differences of one sign: 2 of 2^8 sign flips are as extreme.
    assert paired(found)["a vs b"]["MAP"] == pytest.approx(2 / 256)
