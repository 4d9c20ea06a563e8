"""What every captured sample says about every head, for one view and one prompt style."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headbank.jobs.capture import Shard
from headbank.numerics import activation
from headbank.numerics.evidence import log_odds
from headbank.numerics.spans import span_mean
from headbank.rerankers.scoring import Reading
from headbank.types import HeadId, PromptStyle, Reweighting, View


@dataclass(frozen=True, eq=False)
class ViewStatistics:
    """Per-sample statistics of all heads; the first axis is the sample."""

    view: View
    style: PromptStyle
    shards: tuple[Shard, ...]
    response_tokens: int | None
    """How many written tokens count as source rows; None: all, and for the query view."""
    mass: tuple[Tensor, ...]
    """One [P, L, H, D] float32 a sample (D differs between samples)."""
    reference: tuple[Tensor, ...]
    """One [P, L, H] float32 a sample."""
    gold: tuple[Tensor, ...]
    """[D] bool a sample."""
    reweighting: tuple[Reweighting, ...] = ()
    """What was done to the attention on tokens before it was summed into `mass`."""
    _log_odds: dict[float, list[Tensor]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of samples N."""
        return len(self.shards)

    @property
    def questions(self) -> tuple[tuple[int, ...], ...]:
        """The question of each sample as token ids: samples of one question belong in one fold. [N]"""
        return tuple(tuple(shard.query_ids.tolist()) for shard in self.shards)

    @property
    def placements(self) -> int:
        """P, the same for all samples."""
        return int(self.mass[0].shape[0])

    @property
    def heads(self) -> tuple[HeadId, ...]:
        """All heads in the order of the rows of `log_odds`. [L * H]"""
        layers, heads = self.mass[0].shape[1:3]
        return tuple(HeadId(layer, head) for layer in range(layers) for head in range(heads))

    def means(self, sample: int) -> Tensor:
        """Mean attention per document of a sample. [P, L, H, D] float64"""
        return span_mean(self.mass[sample], self.shards[sample].lengths)

    def log_odds(self, exponent: float) -> list[Tensor]:
        """Log-odds of every document under every head, one [P, L * H, D] float64 a sample."""
        if exponent not in self._log_odds:
            self._log_odds[exponent] = [
                log_odds(mass.flatten(1, 2), reference.flatten(1), shard.lengths, exponent)
                for mass, reference, shard in zip(self.mass, self.reference, self.shards, strict=True)
            ]
        return self._log_odds[exponent]

    def reading(self, sample: int, placement: int, heads: Sequence[HeadId], tokens: bool) -> Reading:
        """What the heads gave to the documents of a sample, as a reranker would read it.

        `tokens`: with the attention on every token, which only the query view has.
        """
        shard = self.shards[sample]
        weighs = tokens or bool(self.reweighting)
        layers, numbers = [h.layer for h in heads], [h.head for h in heads]
        at = (placement, layers, numbers)
        return Reading(
            mass=self.mass[sample][at].to(torch.float64),
            reference=self.reference[sample][at].to(torch.float64),
            lengths=shard.lengths,
            token_mass=shard.token_mass("query", at) if weighs else None,
            null_mass=shard.token_mass("null", at) if tokens else None,
            token_ids=tuple(shard.token_ids.tolist()) if weighs else (),
            query_ids=tuple(shard.query_ids.tolist()) if weighs else (),
        )


@dataclass(frozen=True)
class Activation:
    """Activation of every head on every sample (Expert Heads, ICLR 2026)."""

    active: Tensor
    """[N, P, L, H] bool"""
    gold_mean: Tensor
    """Mean attention over the gold documents. [N, P, L, H] float64"""
    precision: Tensor
    """Average precision. [N, P, L, H] float64"""

    def of(self, index: Tensor) -> "Activation":
        """The part of some samples, `index` [n] int64."""
        return Activation(self.active[index], self.gold_mean[index], self.precision[index])


def view_statistics(
    shards: Sequence[Shard],
    view: View,
    style: PromptStyle,
    response_tokens: int | None = None,
    reweighting: tuple[Reweighting, ...] = (),
) -> ViewStatistics:
    """Statistics of one view; only the query view can be reweighted. Raises ValueError without shards."""
    if not shards:
        raise ValueError("no usable calibration sample")
    found = [shard.attention(view, response_tokens) for shard in shards]
    masses = [attention.mass for attention in found]
    if reweighting:
        masses = [_reweighted(shard, reweighting) for shard in shards]
    return ViewStatistics(
        view,
        style,
        tuple(shards),
        response_tokens,
        tuple(masses),
        tuple(attention.reference for attention in found),
        tuple(shard.gold for shard in shards),
        reweighting,
    )


def _reweighted(shard: Shard, how: tuple[Reweighting, ...]) -> Tensor:
    """Mass per document over reweighted tokens. [P, L, H, D] float64"""
    tokens = shard.token_mass("query")
    flat = Reading(
        mass=torch.empty(0),
        reference=torch.empty(0),
        lengths=shard.lengths,
        token_mass=tokens.flatten(0, 2),
        token_ids=tuple(shard.token_ids.tolist()),
        query_ids=tuple(shard.query_ids.tolist()),
    )
    return flat.reweighted(how).mass.reshape(*tokens.shape[:3], -1)


def activation_of(statistics: ViewStatistics) -> Activation:
    """Which heads are activated, sample by sample."""
    pairs = [(statistics.means(i), statistics.gold[i]) for i in range(statistics.count)]
    return Activation(
        torch.stack([activation.is_activated(m, g) for m, g in pairs]),
        torch.stack([m[..., g].mean(-1) for m, g in pairs]),
        torch.stack([activation.average_precision(m, g) for m, g in pairs]),
    )
