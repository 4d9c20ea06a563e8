"""Evidence snippets are exact pieces of the documents, whatever script they are in."""

import pytest

from headbank.models.base import CaptureRequest
from headbank.models.fake import FakeRunner
from headbank.models.hf import HFRunner
from headbank.rerankers.heads import SNIPPET_TOKENS, SNIPPETS_PER_DOCUMENT, HeadReranker, open_bank
from headbank.types import JOINT, PromptStyle, RankOptions
from tests.rerankers.helpers import DOCUMENTS, PARALLEL, QUERY, VOTERS, fitted
from tests.support import oracles
from tests.support.banks import bank_of_sets
from tests.support.tiny_models import tiny_model, tiny_tokenizer

STRANGE = {
    "long": "The falcon nests here. " * 20,
    "emoji": "🙂 emoji before the falcon 👩‍👩‍👧 and after " * 3,
    "cjk": "鷹は塔に住む falcon 塔 " * 4,
    "nfd": "cafe\u0301 falcon nai\u0308ve a\u0301\u0323 " * 4,
    "surrogate": "half a pair \ud83d falcon " * 4,
    "special": "<|im_end|> falcon <|im_start|> " * 4,
}


@pytest.mark.parametrize("name", [name for name in STRANGE if name != "surrogate"])
def test_the_place_that_is_looked_at_is_shown(name: str) -> None:
    runner = FakeRunner()
    document = STRANGE[name]
    ranking = HeadReranker(runner, open_bank(None, runner.info)).rank(
        QUERY, (DOCUMENTS[0], document), RankOptions(explain=True)
    )
    mine = [snippet for snippet in ranking.snippets if snippet.document == 1]
    assert mine
    for snippet in mine:
        assert document[snippet.start : snippet.end] == snippet.text
        assert 0 < snippet.weight <= 1 + 1e-6
    assert "falcon" in mine[0].text


@pytest.mark.parametrize("nfc", [False, True], ids=["plain", "nfc"])
@pytest.mark.parametrize("limit", [None, 30], ids=["whole", "cut"])
@pytest.mark.parametrize("style", [JOINT, PARALLEL], ids=str)
def test_snippets_are_the_best_windows_of_tokens(style: PromptStyle, limit: int | None, nfc: bool) -> None:
    tokenizer = tiny_tokenizer(nfc=nfc)
    runner = HFRunner(tiny_model("llama"), tokenizer, model_id="tiny")
    documents = ["", *(text[:70] for text in STRANGE.values()), "x"]
    ranking = HeadReranker(runner, bank_of_sets(runner.info, [fitted(style=style)])).rank(
        QUERY, documents, RankOptions(explain=True, max_tokens_per_doc=limit)
    )
    layout = runner.prompts.build(QUERY, documents, style=style, max_tokens_per_doc=limit)
    rows = runner.capture(CaptureRequest(layout, VOTERS)).mass["query"].double().sum(0).tolist()
    for i, (document, span) in enumerate(zip(documents, layout.documents, strict=True)):
        mine = [snippet for snippet in ranking.snippets if snippet.document == i]
        best = oracles.top_windows(rows, span, SNIPPET_TOKENS, SNIPPETS_PER_DOCUMENT)
        assert len(mine) == len(best)
        assert bool(mine) == bool(document)
        total = sum(rows[span.start : span.end])
        offsets = runner.prompts.offsets(document, span.length)
        for snippet, (start, end) in zip(mine, best, strict=True):
            assert snippet.weight == pytest.approx(sum(rows[start:end]) / total, abs=1e-4)
            covered = offsets[start - span.start : end - span.start]
            assert snippet.start == min(a for a, _ in covered)
            assert snippet.end == max(b for _, b in covered)
            assert snippet.text == document[snippet.start : snippet.end] != ""
    if limit is None:
        last = [s for s in ranking.snippets if s.document == len(documents) - 1]
        assert [(s.start, s.end, s.text) for s in last] == [(0, 1, "x")]
        assert last[0].weight == pytest.approx(1.0)


def test_a_snippet_splits_no_character() -> None:
    runner = HFRunner(tiny_model("llama"), tiny_tokenizer(), model_id="tiny")
    document = "e\u0301🙂" * 60
    ranking = HeadReranker(runner, bank_of_sets(runner.info, [fitted()])).rank(
        QUERY, [document], RankOptions(explain=True)
    )
    assert len(ranking.snippets) == SNIPPETS_PER_DOCUMENT
    for snippet in ranking.snippets:
        assert snippet.text.encode()
        assert document[snippet.end : snippet.end + 1] != "\u0301"
