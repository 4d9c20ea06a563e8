"""BM25: tokens, the formula, and the inputs that break it elsewhere."""

import math

import pytest

from headbank.rerankers.base import Reranker
from headbank.rerankers.bm25 import BM25, HALF_SCORE, words
from headbank.types import RankOptions

DOCUMENTS = ("The cat sat.", "A dog sat by the door", "", "cat cat cat and one very long tail of other words")


def test_words() -> None:
    assert words("Ｃafé-Bar, STRASSE x_1!") == ["café", "bar", "strasse", "x_1"]
    assert words("東京タワーへ行くv2") == [
        *"東京タワーへ行く",
        "東京",
        "京タ",
        "タワ",
        "ワー",
        "ーへ",
        "へ行",
        "行く",
        "v2",
    ]
    assert words("한국 水") == ["한", "국", "한국", "水"]
    assert words("… ・ !") == []


def test_scores_follow_the_formula() -> None:
    query, documents = "cat dog cat", ["cat sat", "dog dog sat up", "bird"]
    k1, b, average = 1.5, 0.75, 7 / 3

    def weight(count: int, length: int) -> float:
        return count * (k1 + 1) / (count + k1 * (1 - b + b * length / average))

    idf = math.log(4 / 1)
    raw = [2 * idf * weight(1, 2), idf * weight(2, 4), 0.0]
    ranking = BM25().rank(query, documents, RankOptions())
    assert ranking.scores == pytest.approx([s / (s + HALF_SCORE) for s in raw], rel=1e-12)
    assert ranking.order == (0, 1, 2)
    assert ranking.scores[2] == 0.0
    assert ranking.input_tokens == 3 + 7
    assert ranking.method == "bm25"
    assert ranking.cut == () and ranking.votes == ()
    assert set(ranking.seconds) == {"tokenise", "forward", "vote"}
    assert all(s >= 0 for s in ranking.seconds.values())


@pytest.mark.parametrize(
    ("query", "documents"),
    [("cat", []), ("cat", ["", " ", "?!"]), ("?!", list(DOCUMENTS)), ("", [""]), ("zebra", list(DOCUMENTS))],
)
def test_nothing_in_common_scores_zero_in_input_order(query: str, documents: list[str]) -> None:
    ranking = BM25().rank(query, documents, RankOptions())
    assert ranking.scores == (0.0,) * len(documents)
    assert ranking.order == tuple(range(len(documents)))


def test_order_is_kept_where_scores_saturate() -> None:
    query = " ".join(f"w{i}" for i in range(3000))
    ranking = BM25().rank(query, ["w1", query, query], RankOptions())
    assert ranking.order == (1, 2, 0)
    assert ranking.scores[1] == ranking.scores[2] < 1.0


def test_a_single_document_that_matches_scores_above_zero() -> None:
    ranking = BM25().rank("the cat", ["The cat sat."], RankOptions())
    assert 0 < ranking.scores[0] < 1


def test_equal_documents_keep_their_order() -> None:
    ranking = BM25().rank("cat", [DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[3], DOCUMENTS[0]], RankOptions())
    assert ranking.scores[1] == ranking.scores[3]
    assert ranking.order.index(1) < ranking.order.index(3)
    assert ranking.order[-1] == 0


def test_documents_are_cut_to_the_limit() -> None:
    ranking = BM25().rank("cat", ["a dog and a cat", "cat", "no"], RankOptions(max_tokens_per_doc=2))
    assert ranking.cut == (0,)
    assert ranking.scores[0] == 0.0
    assert ranking.order == (1, 0, 2)
    assert ranking.input_tokens == 1 + 2 + 1 + 1


def test_japanese_without_spaces() -> None:
    documents = ["京都の寺は古い", "東京タワーの高さは三百三十三メートル", "大阪の食べ物"]
    assert BM25().rank("東京タワーの高さ", documents, RankOptions()).order[0] == 1


def test_it_is_a_reranker() -> None:
    method: Reranker = BM25()
    assert method.name == "bm25"
