"""How heads vote: from the mean attention per head and document to one score per document.

Sums over heads are exactly rounded (`math.fsum`): documents that got the same votes have the same score bit
for bit, whichever heads they got them from and wherever they stand, so ties are found and scores do not
depend on the order of heads.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headbank.errors import NonFiniteScore
from headbank.types import Aggregation


def borda(means: Tensor) -> Tensor:
    """Borda count (the paper's voting), as the share of points that a document could get.

    A head gives a document one point for each document it attends to less and half a point for each it
    attends to equally: `score = sum over heads of points / (n (D - 1))`. `means` [n, D] -> [D] float64 in
    [0, 1]; a single document scores 1. Raises ValueError without heads, NonFiniteScore for NaN or infinity.
    """
    _check(means)
    heads, documents = means.shape
    if documents == 1:
        return means.new_ones(1, dtype=torch.float64)
    points = documents - _average_ranks(means)
    return _exact_sum(points) / (heads * (documents - 1))


def rrf(means: Tensor, k: int = 60) -> Tensor:
    """Reciprocal rank fusion (Cormack et al., SIGIR 2009): `sum over heads of 1 / (k + rank)`.

    Ranks start at 1 and equal means share their average rank. Divided by `n / (k + 1)`, the score of a
    document that is first for every head, so [n, D] -> [D] float64 in (0, 1]. Raises as `borda` does.
    """
    _check(means)
    return _exact_sum((k + 1) / (k + _average_ranks(means))) / means.shape[0]


def share(means: Tensor) -> Tensor:
    """Mean over heads of `mean / sum over documents of mean`; a head that sees no document gives each 1/D.

    `means` [n, D], not negative -> [D] float64 that sums to 1. Raises as `borda` does, and ValueError for a
    negative value.
    """
    _check(means)
    if bool((means < 0).any()):
        raise ValueError("attention cannot be negative")
    heads, documents = means.shape
    means = means.to(torch.float64)
    totals = _exact_sum(means.T)[:, None]
    shares = torch.where(totals > 0, means / totals, 1 / max(documents, 1))
    return _exact_sum(shares) / heads


def ranks(means: Tensor) -> Tensor:
    """The rank each head gives each document, 1 for the most attended; equal means rank by input index.

    [n, D] -> [n, D] int64. Raises as `borda` does.
    """
    _check(means)
    order = means.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(1, means.shape[1] + 1, device=means.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


_RULES: dict[Aggregation, Callable[[Tensor], Tensor]] = {"borda": borda, "rrf": rrf, "share": share}


def vote(means: Tensor, aggregation: Aggregation) -> Tensor:
    """Scores [D] float64 of `means` [n, D] by the named rule. Raises ValueError for an unknown name."""
    rule = _RULES.get(aggregation)
    if rule is None:
        raise ValueError(f"aggregation must be one of: {', '.join(_RULES)}")
    return rule(means)


def vote_order(means: Tensor, aggregation: Aggregation) -> tuple[Tensor, tuple[int, ...]]:
    """Scores [D] and the documents' indices, best first: by score, then `share`, then input index.

    Raises as `vote` and `share` do.
    """
    scores = vote(means, aggregation)
    keys = list(zip(scores.tolist(), share(means).tolist(), strict=True))
    return scores, tuple(sorted(range(len(keys)), key=lambda i: (-keys[i][0], -keys[i][1], i)))


def _average_ranks(means: Tensor) -> Tensor:
    """The rank each head gives each document, [n, D] float64; equal means share their average place."""
    means = means.contiguous()
    ascending = means.sort(dim=-1).values
    less = torch.searchsorted(ascending, means)
    at_most = torch.searchsorted(ascending, means, right=True)
    # `D - at_most` documents lie above; the equals, this one included, take the next `at_most - less` places.
    return means.shape[1] - at_most + (at_most - less + 1).to(torch.float64) / 2


def _exact_sum(values: Tensor) -> Tensor:
    """Sum of a matrix over its first dimension, exactly rounded, float64."""
    return torch.tensor(
        [math.fsum(column) for column in values.T.tolist()], dtype=torch.float64, device=values.device
    )


def _check(means: Tensor) -> None:
    if means.shape[0] == 0:
        raise ValueError("a vote needs at least one head")
    if not bool(means.isfinite().all()):
        raise NonFiniteScore("a head's attention on a document is not a finite number")
