"""Requests that wait for the engine, and which of them go to it together."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headbank.types import Ranking
from service.engine import Job

BYTES_PER_TOKEN = 4
"""Of UTF-8, on the low side for most languages and tokenizers: batches are a little smaller than they may be."""

DOCUMENT_TOKENS = 8
"""What a document takes besides its text: its label."""

PROMPT_TOKENS = 64
"""What a prompt takes besides query and documents."""


def estimated_tokens(job: Job) -> int:
    """About how many tokens a job's prompt has, from its length in bytes."""
    limit = job.options.max_tokens_per_doc
    lengths = [_tokens(document) for document in job.documents]
    if limit is not None:
        lengths = [min(length, limit) for length in lengths]
    return PROMPT_TOKENS + _tokens(job.query) + sum(lengths) + DOCUMENT_TOKENS * len(lengths)


def _tokens(text: str) -> int:
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


@dataclass(eq=False)
class Pending:
    """A request that waits for its turn or its answer; its future is done when nobody waits any more."""

    job: Job
    answer: "asyncio.Future[Ranking]"
    arrived: float
    deadline: float
    """Both in seconds of the event loop's clock."""
    tokens: int
    """Estimated."""
    alone: bool = False
    """It shares no batch: what it takes long over would keep others waiting, or it is suspected to have ended an
    engine."""


class Queue:
    """First come, first served; neighbours in the queue may go together."""

    def __init__(self) -> None:
        self._waiting: deque[Pending] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, pending: Pending) -> None:
        """Put a request last."""
        self._waiting.append(pending)

    def put_back(self, batch: Sequence[Pending]) -> None:
        """Put a batch first again, in its order."""
        self._waiting.extendleft(reversed(batch))

    def discard(self, pending: Pending) -> None:
        """Take a request out if it is there."""
        if pending in self._waiting:
            self._waiting.remove(pending)

    def take(self, budget: int, now: float) -> list[Pending]:
        """The oldest requests that somebody still waits for, as many as fit a budget of tokens; empty when none is.

        They keep their order. The first is taken whatever its size; one that must be alone has a batch of its own.
        """
        batch: list[Pending] = []
        while self._waiting:
            first = self._waiting[0]
            if first.answer.done() or first.deadline <= now:
                self._waiting.popleft()
                continue
            if batch and (first.alone or batch[0].alone or first.tokens > budget):
                break
            batch.append(self._waiting.popleft())
            budget -= first.tokens
        return batch

    def drain(self) -> list[Pending]:
        """Take all out."""
        drained = list(self._waiting)
        self._waiting.clear()
        return drained
