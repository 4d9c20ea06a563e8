"""Everything needed to recompute a ranking with plain transformers, in one file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headbank.errors import InputError, InputTooLong
from headbank.models.base import Capture, CaptureRequest
from headbank.rerankers.base import Task
from headbank.rerankers.heads import HeadReranker, reading_of
from headbank.rerankers.scoring import Reading, Scores, score, voter_weights
from headbank.types import HeadId, HeadSet, PromptLayout, RankOptions

Arrays = dict[str, Any]
"""Name in the file -> numpy array."""


def dump_ranking(
    reranker: HeadReranker, query: str, documents: Sequence[str], options: RankOptions, path: Path
) -> None:
    """Write an `.npz` with the vote of one request.

    The prompt: `ids` [T + R] int64, followed by what the model wrote (response view); `positions` [T + R];
    `prompt_tokens` T; `prefix_end` and `tail_start`, between which the documents lie; `spans` [D, 2], the half-open
    token range of each document, and `blocks` [D, 2], the same with label and separator; `layout`; `source` [S], the
    source rows. The vote: `heads` [n, 2], layer and head; `mass` [n, D] and `reference` [n] float64; `aggregation`;
    `scores` [D] and `order` [D].

    To recompute: run the model on `ids` at `positions` with eager attention, where token i sees token j <= i, but
    in `parallel` none of another block; a layer with a sliding window w also needs `positions[i] - positions[j] < w`.
    Take `attentions[layer][0, head, source, :T]` and average over rows: summed over spans that is `mass`, summed over
    the tokens before `prefix_end` and from `tail_start` `reference`. Then apply the rule:

    * `borda`, `rrf`, `share`: see `headbank.numerics.voting`; they take `mass` / length.
    * `evidence`: `z = weights @ ((log(mass) - exponent * log(length) - log(reference) - z_mean) / z_std)`, with
      `exponent`, `z_mean`, `z_std` and `weights` [n] in the file, masses at least 1e-9, lengths at least 1. Scores are
      `1 / (1 + exp(-a z - b))` with `platt` = (a, b), and the order is that of `raw_scores` z.
    * `calibrated`: run the content-free prompt too (`null_ids` and so on, as above), and see `headbank.numerics.icr`.

    Raises OSError when the file cannot be written, InputError without documents, InputTooLong for more than fit one
    prompt, and what `HeadReranker.rank` raises.
    """
    if not documents:
        raise InputError("documents", "must not be empty")
    heads = reranker.head_set(options)
    task = reranker.prepare(Task(query, tuple(documents), options), heads)
    if len(task.parts) > 1:
        limit = reranker.runner.info.context_tokens
        raise InputTooLong(
            "documents", f"do not fit one prompt of {limit} tokens, a dump holds no more", limit
        )
    (part,) = task.parts
    requests = [
        CaptureRequest(part.layout, task.voters, (heads.view,), max(1, reranker.answer_tokens(heads)))
    ]
    if part.null is not None:
        requests.append(CaptureRequest(part.null, task.voters))
    asked, *nulls = reranker.runner.capture_many(requests)
    null_mass = nulls[0].mass["query"] if nulls else None
    reading = reading_of(part.layout, asked.mass[heads.view], part.null, null_mass)
    scores = score(heads, reading, task.voters, options.aggregation)
    arrays = _prompt(part.layout, asked, asked.source[heads.view])
    if part.null is not None:
        null = _prompt(part.null, nulls[0], nulls[0].source["query"])
        arrays |= {f"null_{name}": values for name, values in null.items()}
    np.savez(path, **arrays, **_vote(heads, task.voters, reading, scores, options))


def _prompt(layout: PromptLayout, capture: Capture, source: Sequence[int]) -> Arrays:
    return {
        "ids": _integers([*layout.ids, *capture.response]),
        "positions": _positions(layout, len(capture.response)).numpy(),
        "prompt_tokens": _integers(layout.length),
        "prefix_end": _integers(layout.prefix_end),
        "tail_start": _integers(layout.tail_start),
        "spans": _integers(layout.documents),
        "blocks": _integers(layout.blocks),
        "layout": np.array(layout.style.layout),
        "source": _integers(source),
    }


def _vote(
    heads: HeadSet, voters: Sequence[HeadId], reading: Reading, scores: Scores, options: RankOptions
) -> Arrays:
    aggregation = options.aggregation or heads.default_aggregation
    arrays = {
        "heads": _integers(voters),
        "mass": reading.mass.numpy(),
        "reference": reading.reference.numpy(),
        "aggregation": np.array(aggregation),
        "scores": np.array(scores.scores),
        "order": _integers(scores.order),
    }
    if scores.raw is None:
        return arrays
    rows = [heads.heads.index(head) for head in voters]
    return arrays | {
        "raw_scores": scores.raw.numpy(),
        "exponent": np.array(heads.exponent),
        "z_mean": np.array(heads.z_mean)[rows],
        "z_std": np.array(heads.z_std)[rows],
        "weights": voter_weights(heads, voters).numpy(),
        "platt": np.array(heads.platt or (1.0, 0.0)),
    }


def _positions(layout: PromptLayout, n_written: int) -> Tensor:
    """Position of every token of the prompt and of those written after it. [T + R] int64"""
    positions = torch.arange(layout.length + n_written)
    positions[layout.tail_start :] += layout.tail_position - layout.tail_start
    if layout.style.layout == "parallel":
        for block in layout.blocks:
            positions[block.start : block.end] += layout.prefix_end - block.start
    return positions


def _integers(values: object) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int64)
