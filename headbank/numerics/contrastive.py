"""Contrastive retrieval heads (CoRe, arXiv 2510.02219): heads that prefer golds to distractors."""

import torch
from torch import Tensor

from headbank.numerics.checks import check_labelled


def contrastive_score(means: Tensor, gold: Tensor, temperature: float) -> Tensor:
    """`mean over golds g of exp(s_g / t) / (exp(s_g / t) + sum over distractors d of exp(s_d / t))`.

    This is InfoNCE's share of the gold, per head; golds do not compete with each other. `means` [L, H, D], not
    negative, `gold` [D] bool. The score s of a document is its share of the head's attention on all documents,
    not the attention itself: at one temperature, heads that attend to documents weakly and strongly are then
    judged alike. A head that sees no document has equal shares. Returns [L, H] float64; the paper averages it
    over samples. Raises ValueError for a temperature that is not positive, negative values, without a gold or a
    distractor, and for values that are not finite.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    check_labelled(means, gold)
    if bool((means < 0).any()):
        raise ValueError("attention cannot be negative")
    means = means.to(torch.float64)
    total = means.sum(-1, keepdim=True)
    logits = torch.where(total > 0, means / total, 1 / means.shape[-1]) / temperature
    distractors = logits[..., ~gold].logsumexp(-1, keepdim=True)
    return torch.sigmoid(logits[..., gold] - distractors).mean(-1)
