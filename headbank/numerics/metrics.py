"""Retrieval metrics of rankings, and how sure their means are."""

from collections.abc import Sequence

import ir_measures
import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

MAX_PERMUTATIONS = 10_000


def rank_metrics(order: Sequence[int], relevance: Sequence[int], k: int = 2) -> dict[str, float]:
    """`rank_metrics_many` of one query."""
    return rank_metrics_many([order], [relevance], k)[0]


def rank_metrics_many(
    orders: Sequence[Sequence[int]], relevances: Sequence[Sequence[int]], k: int = 2
) -> list[dict[str, float]]:
    """P@k, NDCG@k, MAP, MRR and R@k of each query, as trec_eval defines them; `k` stands in the names.

    `orders[q]` lists document indices, best first, and may leave documents out; `relevances[q]` has a grade
    per document. A grade of 1 or more is relevant, NDCG's gain is the grade itself over log2(rank + 1). P@k
    divides by k even when fewer documents exist; a query with nothing relevant gets 0 everywhere. Raises
    ValueError when an order repeats an index or names one that has no grade, and for a k below 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    qrels: dict[str, dict[str, int]] = {}
    run: dict[str, dict[str, float]] = {}
    for query, (order, relevance) in enumerate(zip(orders, relevances, strict=True)):
        if len(set(order)) != len(order) or not set(order) <= set(range(len(relevance))):
            raise ValueError(
                f"order of query {query} must be distinct indices of its {len(relevance)} documents"
            )
        qrels[str(query)] = {str(i): int(grade) for i, grade in enumerate(relevance)}
        # trec_eval keeps scores as float32 and breaks ties by name: whole numbers keep the order exactly.
        run[str(query)] = {str(i): float(len(order) - place) for place, i in enumerate(order)}
    names = {
        ir_measures.P @ k: f"P@{k}",
        ir_measures.nDCG @ k: f"NDCG@{k}",
        ir_measures.AP: "MAP",
        ir_measures.RR: "MRR",
        ir_measures.R @ k: f"R@{k}",
    }
    rows: list[dict[str, float]] = [dict.fromkeys(names.values(), 0.0) for _ in orders]
    for metric in ir_measures.pytrec_eval.iter_calc(list(names), qrels, run):
        rows[int(metric.query_id)][names[metric.measure]] = float(metric.value)
    return rows


def bootstrap_interval(
    values: ArrayLike, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values` [N]: (low, high).

    With one value, or equal ones, both ends are that value. Raises ValueError for N = 0 and for values that
    are not finite.
    """
    array = _finite_vector(values)
    if array.min() == array.max():
        return float(array[0]), float(array[0])
    rng = np.random.default_rng(seed)
    means = array[rng.integers(array.size, size=(resamples, array.size))].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def mean_with_interval(values: ArrayLike, seed: int = 0) -> dict[str, float]:
    """`mean`, `low` and `high` of `values` [N], with the 95 % interval of `bootstrap_interval`; raises as it does."""
    low, high = bootstrap_interval(values, seed=seed)
    return {"mean": float(np.asarray(values, dtype=np.float64).mean()), "low": low, "high": high}


def paired_p_value(a: ArrayLike, b: ArrayLike, seed: int = 0) -> float:
    """Two-sided sign-flip permutation test of `mean(a - b) = 0`; `a` and `b` are [N], paired by position.

    Exact when 2^N is at most `MAX_PERMUTATIONS`, sampled otherwise; equal inputs and a single pair give 1.
    Raises ValueError for N = 0, for different lengths and for values that are not finite.
    """
    first, second = _finite_vector(a), _finite_vector(b)
    if first.shape != second.shape:
        raise ValueError(f"a paired test needs equal lengths, got {first.size} and {second.size}")
    difference = first - second
    if difference.size == 1 or not difference.any():
        return 1.0
    result = stats.permutation_test(
        (difference,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=MAX_PERMUTATIONS,
        batch=1000,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def _finite_vector(values: ArrayLike) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError("at least one value is needed and all must be finite")
    return array
