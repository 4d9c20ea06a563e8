"""Query-focused retrieval heads (QRHead, arXiv 2506.09944): heads that put attention on the golds."""

import torch
from torch import Tensor

from headbank.numerics.checks import check_labelled


def qr_score(mass: Tensor, null_mass: Tensor, gold: Tensor) -> Tensor:
    """QRscore of one sample: attention mass on all its golds, less that of the content-free query.

    `mass` and `null_mass` [L, H, D] are summed over a document's tokens and averaged over those of the query;
    `gold` is [D] bool. Returns [L, H] float64; the paper averages it over samples and takes the top heads. It
    looks at golds alone: a head that floods every document scores high too. Raises ValueError for different
    shapes, without a gold or a distractor, and for values that are not finite.
    """
    if mass.shape != null_mass.shape:
        raise ValueError("the query's and the content-free query's masses must have one shape")
    difference = mass.to(torch.float64) - null_mass.to(torch.float64)
    check_labelled(difference, gold)
    return difference[..., gold].sum(-1)
