"""The head reranker: votes, evidence, the dump that lets anyone recompute a ranking."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headbank.errors import BankError, BankMismatch, InputTooLong
from headbank.jobs.dump import dump_ranking
from headbank.models.fake import FakeRunner
from headbank.models.hf import HFRunner
from headbank.rerankers.heads import HeadReranker, open_bank
from headbank.types import HeadId, ModelInfo, RankOptions, View
from tests.support.banks import bank_of
from tests.support.planted import planted_runner, planted_samples
from tests.support.tiny_models import eager, tiny_runner

QUERY = "Where does the falcon nest?"
DOCUMENTS = (
    "Rivers carry cold water to the sea.",
    "The falcon nests on the granite tower, high above the old harbour.",
    "Bread is baked in the morning.",
)


@pytest.fixture(scope="module")
def planted() -> tuple[HFRunner, dict[str, HeadId]]:
    return planted_runner()


@pytest.fixture
def fake() -> HeadReranker:
    runner = FakeRunner()
    return HeadReranker(runner, open_bank(None, runner.info))


@pytest.mark.parametrize("view", ["query", "response"])
def test_the_document_the_heads_look_at_comes_first(fake: HeadReranker, view: View) -> None:
    ranking = fake.rank(QUERY, DOCUMENTS, RankOptions(view=view))
    assert ranking.order[0] == 1
    assert ranking.scores[1] == max(ranking.scores)
    assert ranking.method == "heads"


@pytest.mark.parametrize("view", ["query", "response"])
def test_planted_head_ranks_golds_wherever_they_stand(planted: Any, view: View) -> None:
    runner, heads = planted
    reranker = HeadReranker(runner, bank_of(runner.info, (heads["planted"],)), response_tokens=2)
    for sample in planted_samples(3):
        golds = set(sample.golds)
        for turn in range(len(sample.documents)):
            order = [(i + turn) % len(sample.documents) for i in range(len(sample.documents))]
            ranking = reranker.rank(
                sample.question, [sample.documents[i].content for i in order], RankOptions(view=view)
            )
            assert {order[i] for i in ranking.order[: len(golds)]} == golds


@pytest.mark.parametrize("count", [0, 1])
def test_no_and_one_document_are_legal(fake: HeadReranker, count: int) -> None:
    ranking = fake.rank(QUERY, DOCUMENTS[1 : 1 + count], RankOptions())
    assert ranking.order == tuple(range(count))
    assert ranking.scores == (1.0,) * count


def test_empty_and_duplicated_documents_keep_input_order(fake: HeadReranker) -> None:
    ranking = fake.rank(QUERY, ("", DOCUMENTS[0], DOCUMENTS[0], ""), RankOptions(aggregation="borda"))
    assert ranking.scores[1] == ranking.scores[2]
    assert ranking.scores[0] == ranking.scores[3]
    assert ranking.order.index(1) < ranking.order.index(2)
    assert ranking.order.index(0) < ranking.order.index(3)


def test_the_same_request_gives_the_same_scores(planted: Any) -> None:
    runner, _ = planted
    reranker = HeadReranker(runner, bank_of(runner.info, (HeadId(1, 2), HeadId(2, 1))))
    sample = planted_samples(1)[0]
    texts = [document.content for document in sample.documents]
    options = RankOptions(aggregation="share")
    assert (
        reranker.rank(sample.question, texts, options).scores
        == reranker.rank(sample.question, texts, options).scores
    )


def test_votes_name_every_head_with_masses_means_and_ranks(fake: HeadReranker) -> None:
    ranking = fake.rank(QUERY, DOCUMENTS, RankOptions(explain=True))
    (vote,) = ranking.votes
    assert str(vote.head) == "L2H1"
    assert vote.ranks[1] == 1
    layout = fake.layout(QUERY, DOCUMENTS, RankOptions())
    lengths = [span.length for span in layout.documents]
    assert vote.mean == pytest.approx([m / n for m, n in zip(vote.mass, lengths, strict=True)])


def test_without_explain_there_are_no_votes(fake: HeadReranker) -> None:
    ranking = fake.rank(QUERY, DOCUMENTS, RankOptions())
    assert (ranking.votes, ranking.snippets) == ((), ())


@pytest.mark.parametrize(
    "document",
    [
        "The falcon nests here. " * 20,
        "🙂 emoji before the falcon 👩‍👩‍👧 and after",
        "鷹は塔に住む falcon 塔",
        "cafe\u0301 falcon nai\u0308ve",
    ],
    ids=["long", "emoji", "cjk", "nfd"],
)
def test_snippets_are_pieces_of_their_document(fake: HeadReranker, document: str) -> None:
    ranking = fake.rank(QUERY, (DOCUMENTS[0], document), RankOptions(explain=True))
    mine = [snippet for snippet in ranking.snippets if snippet.document == 1]
    assert mine
    for snippet in mine:
        assert document[snippet.start : snippet.end] == snippet.text
        assert 0 < snippet.weight <= 1
    assert "falcon" in mine[0].text


def test_a_cut_document_is_reported_and_the_others_still_rank(fake: HeadReranker) -> None:
    documents = ("word " * 5000, DOCUMENTS[1])
    ranking = fake.rank(QUERY, documents, RankOptions(max_tokens_per_doc=50))
    assert ranking.cut == (0,)
    assert ranking.order[0] == 1


def test_a_set_over_the_context_is_refused_by_name(fake: HeadReranker) -> None:
    with pytest.raises(InputTooLong) as caught:
        fake.rank(QUERY, ("word " * 5000, DOCUMENTS[1]), RankOptions())
    assert caught.value.field == "documents"
    assert caught.value.limit is not None


class Windowed(FakeRunner):
    """The fake engine with a sliding window in the layer of the biased head, and others on demand."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        super().__init__()
        self.windows = windows

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, windows=self.windows)


def test_heads_behind_a_window_shorter_than_the_prompt_do_not_vote() -> None:
    runner = Windowed((None, 20, None, None))
    reranker = HeadReranker(runner, bank_of(runner.info, (HeadId(1, 0), HeadId(2, 1))))
    long = reranker.rank(QUERY, DOCUMENTS, RankOptions(explain=True))
    assert [str(vote.head) for vote in long.votes] == ["L2H1"]
    short = reranker.rank("falcon", ("a",), RankOptions(explain=True))
    assert short.input_tokens <= 20
    assert [str(vote.head) for vote in short.votes] == ["L1H0", "L2H1"]


@pytest.mark.parametrize(("room", "legal"), [(0, False), (16, True)])
def test_the_response_view_counts_the_answer_towards_the_window(room: int, legal: bool) -> None:
    layout = FakeRunner().prompts.build(QUERY, DOCUMENTS)
    runner = Windowed((None, None, layout.length + room, None))
    reranker = HeadReranker(runner, bank_of(runner.info, (HeadId(2, 1),)), response_tokens=16)
    assert reranker.rank(QUERY, DOCUMENTS, RankOptions(view="query")).order[0] == 1
    if legal:
        assert reranker.rank(QUERY, DOCUMENTS, RankOptions(view="response")).order[0] == 1
    else:
        with pytest.raises(InputTooLong) as caught:
            reranker.rank(QUERY, DOCUMENTS, RankOptions(view="response"))
        assert (caught.value.field, caught.value.limit) == ("documents", layout.length)


def test_a_bank_of_another_model_is_refused() -> None:
    runner = FakeRunner()
    with pytest.raises(BankMismatch, match="config_hash"):
        HeadReranker(runner, open_bank(None, replace(runner.info, config_hash="other")))


def test_a_view_without_heads_is_named(planted: Any) -> None:
    runner, heads = planted
    reranker = HeadReranker(runner, bank_of(runner.info, (heads["planted"],), views=("query",)))
    with pytest.raises(BankError, match=r"expert\.response"):
        reranker.rank(QUERY, DOCUMENTS, RankOptions(view="response"))


@pytest.mark.parametrize("view", ["query", "response"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_a_dump_can_be_recomputed_with_plain_transformers(tmp_path: Path, family: str, view: View) -> None:
    runner = tiny_runner(family)
    voters = (HeadId(1, 2), HeadId(0, 0), HeadId(1, 1))
    reranker = HeadReranker(runner, bank_of(runner.info, voters), response_tokens=3)
    path = tmp_path / "vote.npz"
    dump_ranking(reranker, QUERY, DOCUMENTS, RankOptions(view=view), path)
    with np.load(path) as file:
        dump = {name: file[name] for name in file.files}
    recompute_and_compare(runner._model, dump)
    assert tuple(dump["order"]) == reranker.rank(QUERY, DOCUMENTS, RankOptions(view=view)).order


def recompute_and_compare(model: Any, dump: dict[str, Any]) -> None:
    """The recipe of `dump_ranking`, with nothing of this project's forward pass."""
    with eager(model) as plain, torch.no_grad():
        attentions = plain(torch.from_numpy(dump["ids"])[None], output_attentions=True).attentions
    mass = np.zeros_like(dump["mass"])
    for row, (layer, head) in enumerate(dump["heads"]):
        mean = attentions[layer][0, head, dump["source"]].double().mean(0).numpy()
        for i, (start, end) in enumerate(dump["spans"]):
            mass[row, i] = mean[start:end].sum()
    np.testing.assert_allclose(mass, dump["mass"], atol=1e-5, rtol=0)
    means = mass / (dump["spans"][:, 1] - dump["spans"][:, 0])
    beaten = (means[:, :, None] > means[:, None, :]).sum(-1)
    # Half a point for each other document that a head attends to equally (behind a window: not at all).
    equal = (means[:, :, None] == means[:, None, :]).sum(-1) - 1
    points = (beaten + equal / 2).mean(0)
    assert str(dump["aggregation"]) == "borda"
    np.testing.assert_allclose(points / (means.shape[1] - 1), dump["scores"], atol=1e-12)
    ordered = dump["scores"][dump["order"]]
    assert sorted(dump["order"]) == list(range(len(ordered)))
    assert all(ordered[:-1] >= ordered[1:])
