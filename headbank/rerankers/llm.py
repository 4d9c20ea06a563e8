"""Listwise reranking by generation: the same LLM reads the documents and writes their order.

Sun et al., "Is ChatGPT Good at Search?" (RankGPT, arXiv 2304.09542): documents with identifiers, an order written
as `[2] > [1]`, and a window that slides from the last documents to the first where there are many.
"""

import re
import time
from collections.abc import Iterator, Sequence

from headbank.errors import InputError, InputTooLong
from headbank.models.base import HeadRunner, User
from headbank.rerankers.base import by_score
from headbank.types import Ranking, RankOptions

INSTRUCTION = (
    "Below are {n} documents, each under a number in square brackets, and after them a query. Sort the documents by "
    "how well they answer the query, the best first.\n\n"
)
LABEL = "[{number}]\n"
SEPARATOR = "\n\n"
QUERY = "Query:\n"
REQUEST = (
    "\n\nWrite the numbers of all {n} documents, the best first, in the form [2] > [1] > ... and write nothing "
    "else."
)

LABEL_TOKENS = 8
"""What a document takes in the prompt besides its text, at most."""

ANSWER_TOKENS = 6
"""What `[123] > ` takes in the answer, at most."""

SLACK_TOKENS = 16
"""For an answer that does not start at once."""

_BRACKETED = re.compile(r"\[\s*([0-9]{1,9})\s*\]")
_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,9}(?![0-9])")
_LABEL_LIKE = re.compile(r"\[(\s*[0-9]+\s*)\]")


def permutation(text: str, n: int) -> tuple[int, ...]:
    """The order of documents 0..n-1 that a model wrote with the identifiers 1..n.

    Numbers in square brackets count, all whole numbers where there are none. What repeats or is out of range is
    dropped, what is missing follows in the order given, so that nonsense leaves that order alone.
    """
    written = _BRACKETED.findall(text) or _NUMBER.findall(text)
    named = dict.fromkeys(int(number) - 1 for number in written if 1 <= int(number) <= n)
    return tuple(dict.fromkeys([*named, *range(n)]))


def windows(n: int, size: int, step: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of at most `size` places, from the last of n to the first, each `step` before the other.

    With 1 <= step < size, sorting range after range brings the best `size - step` of all to the front, in order.
    """
    end = n
    while end > size:
        yield end - size, end
        end -= step
    yield 0, end


class ListwiseLLM:
    """Method `llm`: the model writes the order of the documents.

    With more documents than a window holds, only the first `window - step` places come from a comparison with all
    others; behind them much of the order given is kept. In documents `[1]` is read as `(1)`, so that no text can
    pass for the number of another document.
    `RankOptions.view`, `aggregation`, `layout` and `explain` have no meaning here.
    """

    name = "llm"

    def __init__(
        self,
        runner: HeadRunner,
        *,
        max_tokens_per_doc: int | None = None,
        window: int = 20,
        step: int = 10,
    ) -> None:
        """`window` documents are read at once at most, and `step` of them are left behind by the next window.

        `max_tokens_per_doc` holds where the options name none; None: an equal share of the context. Raises
        InputError for fewer than 2 documents in a window, for a step outside 1..window-1, or for a limit below 1.
        """
        if window < 2:
            raise InputError("window", "must be at least 2", 2)
        if not 1 <= step < window:
            raise InputError("step", f"must be from 1 to {window - 1}", window - 1)
        _check(max_tokens_per_doc)
        self._runner = runner
        self._max_tokens_per_doc = max_tokens_per_doc
        self._window = window
        self._step = step

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        """Score documents by their place: 1 for the first, 1/D for the last of D.

        A score says which document comes before which, and nothing of how relevant it is. A window shrinks where
        documents of the allowed length do not fit the context; if two do not fit, they are cut. `input_tokens`
        counts the prompts of all windows. Fewer than two documents are not read.

        Raises InputTooLong when the query takes more than half the context or leaves no room for two documents,
        InputError for a limit below 1.
        """
        started = time.perf_counter()
        _check(options.max_tokens_per_doc)
        order = list(range(len(documents)))
        cut: tuple[int, ...] = ()
        input_tokens, forward, vote = 0, 0.0, 0.0
        if len(documents) > 1:
            texts, cut, size = self._fit(query, documents, options.max_tokens_per_doc)
            step = max(1, self._step * size // self._window)
            for start, end in windows(len(documents), size, step):
                ids = self._runner.prompts.chat(_parts(query, [texts[i] for i in order[start:end]]))
                asked = time.perf_counter()
                written = self._runner.generate(ids, ANSWER_TOKENS * (end - start) + SLACK_TOKENS)
                answered = time.perf_counter()
                places = permutation(self._runner.decode(written), end - start)
                order[start:end] = [order[start + place] for place in places]
                input_tokens += len(ids)
                forward += answered - asked
                vote += time.perf_counter() - answered
        scores = [0.0] * len(order)
        for place, index in enumerate(order):
            scores[index] = (len(order) - place) / len(order)
        return Ranking(
            scores=tuple(scores),
            order=by_score(scores),
            method=self.name,
            input_tokens=input_tokens,
            cut=cut,
            seconds={
                "tokenise": time.perf_counter() - started - forward - vote,
                "forward": forward,
                "vote": vote,
            },
        )

    def _fit(
        self, query: str, documents: Sequence[str], limit: int | None
    ) -> tuple[list[str], tuple[int, ...], int]:
        """Texts of at most `limit` tokens, indices of those that were cut, and how many fit one window."""
        prompts = self._runner.prompts
        context = self._runner.info.context_tokens
        half = context // 2
        if len(prompts.offsets(query, half + 1)) > half:
            raise InputTooLong("query", f"takes more than {half} tokens, half of the model's context", half)
        room = context - len(prompts.chat(_parts(query, []))) - SLACK_TOKENS
        besides = LABEL_TOKENS + ANSWER_TOKENS
        most = min(len(documents), self._window)
        limit = limit or self._max_tokens_per_doc or max(1, room // most - besides)
        limit = min(limit, room // 2 - besides)
        if limit < 1:
            raise InputTooLong(
                "documents", f"two of them and the query do not fit the model's context of {context}", context
            )
        texts, cut, longest = [], [], 0
        for index, document in enumerate(documents):
            text = _LABEL_LIKE.sub(r"(\1)", document)
            tokens = prompts.offsets(text, limit + 1)
            if len(tokens) > limit:
                # A character of which only some tokens fit is left out.
                text = text[: min(tokens[limit - 1][1], tokens[limit][0])]
                cut.append(index)
            texts.append(text)
            longest = max(longest, min(len(tokens), limit))
        return texts, tuple(cut), min(most, room // (longest + besides))


def _check(max_tokens_per_doc: int | None) -> None:
    if max_tokens_per_doc is not None and max_tokens_per_doc < 1:
        raise InputError("max_tokens_per_doc", "must be at least 1", 1)


def _parts(query: str, documents: Sequence[str]) -> list[str | User]:
    """One user message about documents that have the identifiers 1, 2, ... in the order given."""
    n = len(documents)
    parts: list[str | User] = [INSTRUCTION.format(n=n)]
    for number, document in enumerate(documents, 1):
        parts += [LABEL.format(number=number), User(document), SEPARATOR]
    return [*parts, QUERY, User(query), REQUEST.format(n=n)]
