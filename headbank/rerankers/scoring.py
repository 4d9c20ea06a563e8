"""From what heads gave to the documents of one request to scores; the same for serving and for offline evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headbank.errors import BankError
from headbank.numerics.evidence import MASS_FLOOR, combine, log_odds, platt, standardise
from headbank.numerics.icr import icr_scores
from headbank.numerics.reattn import reattn_mass
from headbank.numerics.spans import span_mean
from headbank.numerics.voting import vote_order
from headbank.rerankers.base import by_score
from headbank.types import Aggregation, HeadId, HeadSet, Reweighting, Span


@dataclass(frozen=True)
class Reading:
    """What n heads gave to the D documents of one request."""

    mass: Tensor
    """Attention on each document, averaged over the source rows. [n, D] float64"""
    reference: Tensor
    """Attention on the prefix and the tail. [n] float64"""
    lengths: Tensor
    """Tokens of each document. [D] int64"""
    token_mass: Tensor | None = None
    """Attention on every document token, documents after one another. [n, sum of lengths]"""
    null_mass: Tensor | None = None
    """The same from the content-free query. [n, sum of lengths]"""
    token_ids: tuple[int, ...] = ()
    """The document tokens themselves. [sum of lengths]"""
    query_ids: tuple[int, ...] = ()

    def spans(self) -> list[Span]:
        """Where the tokens of each document lie in `token_mass`. [D]"""
        ends = self.lengths.cumsum(0).tolist()
        return [Span(end - length, end) for end, length in zip(ends, self.lengths.tolist(), strict=True)]

    def reweighted(self, how: Sequence[Reweighting]) -> "Reading":
        """With the mass of every document summed over reweighted tokens (`headbank.numerics.reattn`)."""
        if not how:
            return self
        assert self.token_mass is not None, "reweighting needs the attention on every token"
        spans = self.spans()
        ids = [self.token_ids[span.start : span.end] for span in spans]
        mass = reattn_mass(
            self.token_mass,
            spans,
            ids,
            self.query_ids,
            frequency="frequency" in how,
            entropy="entropy" in how,
        )
        return replace(self, mass=mass)


@dataclass(frozen=True)
class Scores:
    """Scores in the order of the input, and the order they make."""

    scores: tuple[float, ...]
    order: tuple[int, ...]
    raw: Tensor | None
    """Combined log-odds z of `evidence`, before they become probabilities. [D] float64"""


def evidence(heads: HeadSet, reading: Reading, voters: Sequence[HeadId]) -> Tensor:
    """Combined log-odds z of the documents, [D] float64: the mean, or the weighted sum, of the standardised log-odds.

    `voters` are the heads of the reading's rows, some or all of the set's. Raises BankError when the set was not
    fitted for it.
    """
    if not heads.z_mean:
        raise BankError(f"head set {heads.name}: evidence was not fitted; recalibrate")
    reading = reading.reweighted(heads.reweighting)
    rows = _rows(heads, voters)
    mean, std = (torch.tensor(values, dtype=torch.float64)[rows] for values in (heads.z_mean, heads.z_std))
    z = standardise(log_odds(reading.mass, reading.reference, reading.lengths, heads.exponent), mean, std)
    return combine(z, voter_weights(heads, voters))


def _rows(heads: HeadSet, voters: Sequence[HeadId]) -> list[int]:
    """Places of the voters in the set."""
    place = {head: row for row, head in enumerate(heads.heads)}
    return [place[head] for head in voters]


def voter_weights(heads: HeadSet, voters: Sequence[HeadId]) -> Tensor:
    """Weights [n] of the voters' standardised log-odds: equal ones that add up to 1, or the set's.

    Where some of the set's heads do not vote, the others take over their share, so that z stays on the scale of the
    set's probabilities.
    """
    if not heads.weights:
        return torch.full((len(voters),), 1 / len(voters), dtype=torch.float64)
    every = torch.tensor(heads.weights, dtype=torch.float64)
    weights = every[_rows(heads, voters)]
    if len(weights) == len(every):
        return weights
    return weights * (every.abs().sum() / weights.abs().sum().clamp(min=1e-12))


def score(
    heads: HeadSet, reading: Reading, voters: Sequence[HeadId], aggregation: Aggregation | None = None
) -> Scores:
    """Scores by the named rule, None: the set's own. `evidence` gives P(relevant), ordered by z.

    Raises BankError as `evidence` does, NonFiniteScore for attention that is not finite.
    """
    rule = aggregation or heads.default_aggregation
    if rule == "evidence":
        z = evidence(heads, reading, voters)
        return Scores(_probabilities(z, heads.platt), by_score(z.tolist()), z)
    if rule == "calibrated":
        assert reading.token_mass is not None and reading.null_mass is not None, "the N/A pass is missing"
        z = icr_scores(reading.token_mass, reading.null_mass, reading.spans())
        return Scores(tuple(z.tolist()), by_score(z.tolist()), None)
    reading = reading.reweighted(heads.reweighting)
    values, order = vote_order(span_mean(reading.mass, reading.lengths), rule)
    return Scores(tuple(values.tolist()), order, None)


def _probabilities(z: Tensor, fitted: tuple[float, float] | None) -> tuple[float, ...]:
    a, b = fitted or (1.0, 0.0)
    return tuple(platt(z, a, b).tolist())


def merge(parts: Sequence[tuple[Sequence[int], Reading]]) -> Reading:
    """One reading from windows of a candidate set: (indices of the window's documents, its reading).

    Attention is first divided by the window's reference, which makes windows comparable; a document in several
    windows gets the mean. The merged reference is 1. Every document must be in some window.
    """
    n_documents = 1 + max(i for indices, _ in parts for i in indices)
    tokens: list[list[Tensor]] = [[] for _ in range(n_documents)]
    nulls: list[list[Tensor]] = [[] for _ in range(n_documents)]
    ids: list[tuple[int, ...]] = [()] * n_documents
    lengths = torch.zeros(n_documents, dtype=torch.long)
    for indices, reading in parts:
        assert reading.token_mass is not None
        reference = reading.reference[:, None].clamp(min=MASS_FLOOR)
        odds = reading.token_mass / reference
        for index, span in zip(indices, reading.spans(), strict=True):
            tokens[index].append(odds[:, span.start : span.end])
            lengths[index] = span.length
            ids[index] = reading.token_ids[span.start : span.end]
            if reading.null_mass is not None:
                null = reading.null_mass / reference
                nulls[index].append(null[:, span.start : span.end])
    means = [torch.stack(found).mean(0) for found in tokens]
    null_means = [torch.stack(found).mean(0) for found in nulls if found]
    return Reading(
        mass=torch.stack([mean.sum(-1, dtype=torch.float64) for mean in means], dim=-1),
        reference=torch.ones(len(means[0]), dtype=torch.float64),
        lengths=lengths,
        token_mass=torch.cat(means, dim=-1),
        null_mass=torch.cat(null_means, dim=-1) if null_means else None,
        token_ids=tuple(i for found in ids for i in found),
        query_ids=parts[0][1].query_ids,
    )
