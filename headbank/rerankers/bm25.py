"""BM25, the lexical baseline.

Lv and Zhai, "Lower-bounding term frequency normalization" (CIKM 2011), as rank-bm25 has it. Its Okapi variant
gives a word that half of the documents share an inverse frequency of zero, and among a handful of documents
that is most words.
"""

import re
import time
import unicodedata
from collections.abc import Sequence

from rank_bm25 import BM25Plus

from headbank.rerankers.base import by_score
from headbank.types import Ranking, RankOptions

HALF_SCORE = 10.0
"""Raw BM25 score that is reported as 0.5."""

# Han, kana and hangul, whose words are not (or not reliably) separated by spaces; letters only.
_UNSPACED = (
    "\u1100-\u11ff\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3131-\u318e\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97c\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
)
_RUNS = re.compile(f"([{_UNSPACED}]+)|[^\\W{_UNSPACED}]+")


def words(text: str) -> list[str]:
    r"""Lower-cased `\w+` words of the NFKC form of `text`.

    A run of Chinese, Japanese or Korean letters gives its single characters, then its pairs of neighbours.
    """
    found: list[str] = []
    for run in _RUNS.finditer(unicodedata.normalize("NFKC", text).lower()):
        if run[1] is None:
            found.append(run[0])
        else:
            found.extend(run[1])
            found.extend(a + b for a, b in zip(run[1], run[1][1:], strict=False))
    return found


class BM25:
    """Rank by BM25 with document frequencies from the documents of the request alone.

    `RankOptions.max_tokens_per_doc` counts words here; `view`, `aggregation` and `explain` have no meaning.
    """

    name = "bm25"

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        """Score every document: `s / (s + HALF_SCORE)` in [0, 1) of the raw BM25 score s; s sets the order.

        A document without a word of the query has s = 0. `input_tokens` counts words of query and documents.
        """
        started = time.perf_counter()
        wanted = words(query)
        corpus = [words(document) for document in documents]
        limit = options.max_tokens_per_doc
        cut = () if limit is None else tuple(i for i, document in enumerate(corpus) if len(document) > limit)
        corpus = [document[:limit] for document in corpus]
        tokenised = time.perf_counter()
        raw = _scores(wanted, corpus)
        scored = time.perf_counter()
        order = by_score(raw)
        return Ranking(
            scores=tuple(s / (s + HALF_SCORE) for s in raw),
            order=order,
            method=self.name,
            raw_scores=tuple(raw),
            input_tokens=len(wanted) + sum(map(len, corpus)),
            cut=cut,
            seconds={
                "tokenise": tokenised - started,
                "forward": scored - tokenised,
                "vote": time.perf_counter() - scored,
            },
        )


def _scores(query: list[str], corpus: list[list[str]]) -> list[float]:
    """Raw scores, at least 0. [D]"""
    if not any(corpus):  # rank-bm25 divides by the average length
        return [0.0] * len(corpus)
    index = BM25Plus(corpus)
    # rank-bm25 adds delta * idf for every word of the query to every document, with the word or without.
    # That constant is taken off, so that a document which shares no word with the query scores exactly 0.
    constant = sum(index.delta * index.idf.get(word, 0.0) for word in query)
    return [float(score - constant) for score in index.get_scores(query)]
