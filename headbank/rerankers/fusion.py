"""Method `fusion`: a head set and other voters (BM25, a dense model), weighted as the calibration job found best."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headbank.bank import Bank
from headbank.errors import BankError, HeadRankError
from headbank.numerics.evidence import combine, platt, standardise
from headbank.rerankers.base import Reranker, Task, by_score
from headbank.rerankers.heads import HeadReranker, Prepared, votes_of
from headbank.rerankers.scoring import Reading, evidence
from headbank.types import Fusion, Ranking, RankOptions


def _with_evidence(task: Task) -> Task:
    """A fusion reads log-odds, whatever rule a caller names or the head set has of its own."""
    return replace(task, options=replace(task.options, aggregation="evidence"))


def raw_scores(ranking: Ranking) -> Tensor:
    """A voter's feature: its scores on an open scale where it has one. [D] float64"""
    return torch.tensor(ranking.raw_scores or ranking.scores, dtype=torch.float64)


def fused(fusion: Fusion, z: Tensor, features: Mapping[str, Tensor]) -> Tensor:
    """Weighted sum [D] of a head set's log-odds z and the voters' features, float64."""
    rows = torch.stack([z, *(features[name] for name in fusion.voters)])
    mean, std, weights = (
        torch.tensor(values, dtype=torch.float64) for values in (fusion.mean, fusion.std, fusion.weights)
    )
    return combine(standardise(rows, mean, std), weights)


class FusionReranker:
    """Ranks by the weighted sum of a head set's log-odds and the other voters' scores, all standardised."""

    name = "fusion"

    def __init__(self, heads: HeadReranker, bank: Bank, voters: Mapping[str, Reranker]) -> None:
        """`voters` by name; a fusion of the bank that needs another one cannot be used."""
        self._heads = heads
        self._bank = bank
        self._voters = dict(voters)

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        """Score documents (see `headbank.rerankers.base.Reranker.rank`): P(relevant), ordered by the weighted sum.

        Raises BankError when the bank has no fusion for the view and layout, or one with a voter that is not there.
        """
        result = self.rank_many([Task(query, tuple(documents), options)])[0]
        if isinstance(result, HeadRankError):
            raise result
        return result

    def rank_many(self, tasks: Sequence[Task]) -> list[Ranking | HeadRankError]:
        """Rank several tasks, heads in shared passes; a task that cannot be ranked gives its error."""
        results: list[Ranking | HeadRankError | None] = [None] * len(tasks)
        prepared: dict[int, tuple[Fusion, Prepared]] = {}
        for i, task in enumerate(tasks):
            try:
                fusion = self._fusion(task.options)
                heads = self._bank.head_sets[fusion.head_set]
                if task.documents:
                    prepared[i] = (fusion, self._heads.prepare(_with_evidence(task), heads))
                else:
                    results[i] = replace(self._heads.empty(task, heads), method=self.name)
            except HeadRankError as error:
                results[i] = error
        started = time.perf_counter()
        readings = self._heads.read([found for _, found in prepared.values()])
        forward_s = time.perf_counter() - started
        for (i, (fusion, found)), reading in zip(prepared.items(), readings, strict=True):
            try:
                results[i] = self._ranking(fusion, found, reading, forward_s)
            except HeadRankError as error:
                results[i] = error
        return [result for result in results if result is not None]

    def _fusion(self, options: RankOptions) -> Fusion:
        fusion = self._bank.fusion(options.view, options.layout)
        missing = [name for name in fusion.voters if name not in self._voters]
        if missing:
            raise BankError(f"fusion {fusion.name} needs the voter {missing[0]}, which is not configured")
        return fusion

    def _ranking(self, fusion: Fusion, found: Prepared, reading: Reading, forward_s: float) -> Ranking:
        started = time.perf_counter()
        task = found.task
        features = {
            name: raw_scores(self._voters[name].rank(task.query, task.documents, task.options))
            for name in fusion.voters
        }
        z = fused(fusion, evidence(found.heads, reading, found.voters), features)
        explain = task.options.explain
        return Ranking(
            scores=tuple(platt(z, *fusion.platt).tolist()),
            order=by_score(z.tolist()),
            method=self.name,
            raw_scores=tuple(z.tolist()),
            input_tokens=found.input_tokens,
            cut=found.cut,
            votes=votes_of(found.voters, reading) if explain else (),
            snippets=self._heads.snippets(reading, task.documents) if explain else (),
            seconds={
                "tokenise": found.tokenise_s,
                "forward": forward_s,
                "vote": time.perf_counter() - started,
            },
        )
