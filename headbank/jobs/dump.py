"""Everything needed to recompute a ranking with plain transformers, in one file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headbank.models.base import Capture
from headbank.rerankers.heads import HeadReranker
from headbank.types import PromptLayout, RankOptions


def dump_ranking(
    reranker: HeadReranker, query: str, documents: Sequence[str], options: RankOptions, path: Path
) -> None:
    """Write an `.npz` with the vote of one request.

    Arrays: `ids` [T + R] int64, the prompt and (response view) what the model wrote after it; `prompt_tokens` T;
    `spans` [D, 2], half-open token range of each document; `source` [S], the source rows; `heads` [n, 2], layer and
    head; `mass` [n, D] float64, the mean over the source rows of the softmax row's sum over each span; `scores` [D]
    and `order` [D]; `aggregation`.

    To recompute: run the model on `ids` with eager attention, take `attentions[layer][0, head, source, :T]`, average
    over rows, sum over spans. Raises OSError when the file cannot be written.
    """
    layout = reranker.layout(query, documents, options)
    capture = reranker.capture(layout, (options.view,))
    mass, scores, order = reranker.rank_captured(capture, layout, options.view, options.aggregation)
    aggregation = options.aggregation or reranker.head_set(options.view).default_aggregation
    arrays: dict[str, Any] = _arrays(layout, capture, options)
    arrays |= {
        "mass": mass.numpy(),
        "scores": scores.numpy(),
        "order": np.array(order, dtype=np.int64),
        "aggregation": np.array(aggregation),
    }
    np.savez(path, **arrays)


def _arrays(layout: PromptLayout, capture: Capture, options: RankOptions) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "ids": np.array([*layout.ids, *capture.response], dtype=np.int64),
        "prompt_tokens": np.array(layout.length, dtype=np.int64),
        "spans": np.array(layout.documents, dtype=np.int64).reshape(-1, 2),
        "source": np.array(capture.source[options.view], dtype=np.int64),
        "heads": np.array(capture.heads, dtype=np.int64).reshape(-1, 2),
    }
