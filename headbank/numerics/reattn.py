"""ReAttn (arXiv 2602.19969): attention re-weighted before it becomes a document's mass.

Two corrections, in the paper's order. Attention likes words of the query wherever they stand: tokens shared with
the query count less the more candidate documents hold them. And attention likes to rest on few tokens: a
document whose remaining attention is concentrated counts less. The paper's idea is kept; the exact weights are
the simplest that fit it, stated at each function.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from headbank.numerics.checks import check_scores
from headbank.numerics.spans import _check_span
from headbank.types import Span


def document_frequency_weights(
    document_ids: Sequence[Sequence[int]], query_ids: Sequence[int]
) -> list[Tensor]:
    """Cross-document IDF: `log(1 + D / df) / log(1 + D)` for tokens that the query holds too, 1 for others.

    `df` is the number of candidate documents with that token. The weight is 1 for a token of one document only
    and falls to `log 2 / log(1 + D)` for one of all. Returns one [length] float64 in (0, 1] per document.
    """
    documents = len(document_ids)
    frequency = Counter(token for ids in document_ids for token in set(ids))
    most = math.log1p(documents)
    weights = {
        token: math.log1p(documents / frequency[token]) / most for token in set(query_ids) & set(frequency)
    }
    return [torch.tensor([weights.get(t, 1.0) for t in ids], dtype=torch.float64) for ids in document_ids]


def entropy_weight(token_mass: Tensor) -> Tensor:
    """`-sum over tokens of p log p / log(length)`, p the share of the document's attention on each token.

    `token_mass` [..., length], not negative -> [...] float64 in [0, 1]: 1 when the attention is spread evenly,
    0 when it rests on one token. Documents of fewer than two tokens, and those without attention, weigh 1.
    Raises ValueError for negative attention, NonFiniteScore for NaN or infinity.
    """
    _check_attention(token_mass)
    token_mass = token_mass.to(torch.float64)
    length = token_mass.shape[-1]
    if length < 2:
        return token_mass.new_ones(token_mass.shape[:-1])
    total = token_mass.sum(-1, keepdim=True)
    share = torch.where(total > 0, token_mass / total, 1 / length)
    entropy = -torch.xlogy(share, share).sum(-1)
    return (entropy / math.log(length)).clamp(0, 1)


def reattn_mass(
    token_mass: Tensor,
    spans: Sequence[Span],
    document_ids: Sequence[Sequence[int]],
    query_ids: Sequence[int],
    *,
    frequency: bool,
    entropy: bool,
) -> Tensor:
    """Mass per head and document after `document_frequency_weights` and then `entropy_weight`, each optional.

    `token_mass` [n, T] is attention as captured, `spans[i]` the tokens of document i and `document_ids[i]` their
    ids. Entropy is that of the attention already weighted by frequency. With neither this is `span_mass`.
    Returns [n, D] float64. Raises ValueError when ids and spans do not match, for a span that does not lie in
    [0, T] and for negative attention, NonFiniteScore for NaN or infinity.
    """
    if [span.length for span in spans] != [len(ids) for ids in document_ids]:
        raise ValueError("every document needs one token id for each token of its span")
    _check_attention(token_mass)
    weights = document_frequency_weights(document_ids, query_ids) if frequency else None
    masses = []
    for i, span in enumerate(spans):
        _check_span(span, token_mass.shape[-1])
        tokens = token_mass[..., span.start : span.end].to(torch.float64)
        if weights is not None:
            tokens = tokens * weights[i].to(tokens.device)
        mass = tokens.sum(-1)
        masses.append(mass * entropy_weight(tokens) if entropy else mass)
    if not masses:
        return token_mass.new_zeros((*token_mass.shape[:-1], 0), dtype=torch.float64)
    return torch.stack(masses, dim=-1)


def _check_attention(token_mass: Tensor) -> None:
    check_scores(token_mass)
    if bool((token_mass < 0).any()):
        raise ValueError("attention cannot be negative")
