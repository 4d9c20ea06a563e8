"""Selection from statistics alone: nothing is measured on the samples it was chosen on."""

from typing import Any

import pytest
import torch

from headbank.jobs import select as module
from headbank.jobs.capture import Shard
from headbank.jobs.select import SelectConfig, cross_validate, view_statistics
from headbank.types import HeadId


def shard(index: int, n_documents: int = 4) -> Shard:
    """Random masses of 2 placements, 2 layers and 2 heads; the first document is gold."""
    generator = torch.Generator().manual_seed(index)
    mass = torch.rand((2, 2, 2, n_documents), generator=generator)
    gold = torch.zeros(n_documents, dtype=torch.bool)
    gold[0] = True
    lengths = torch.randint(1, 9, (n_documents,), generator=generator)
    return Shard(str(index), {"query": mass}, {"query": mass[..., :2]}, lengths, gold, 50)


@pytest.mark.parametrize("n", [2, 5, 11])
def test_no_sample_is_ranked_by_heads_that_were_chosen_on_it(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    choose, measure = module.choose, module._sample_metrics
    trained: list[set[int]] = []
    measured: list[int] = []

    def spy_choose(statistics: Any, index: torch.Tensor, *rest: Any) -> Any:
        trained.append(set(index.tolist()))
        return choose(statistics, index, *rest)

    def spy_measure(statistics: Any, sample: int, *rest: Any) -> Any:
        assert sample not in trained[-1]
        assert len(trained[-1]) >= n - -(-n // min(5, n))
        measured.append(sample)
        return measure(statistics, sample, *rest)

    monkeypatch.setattr(module, "choose", spy_choose)
    monkeypatch.setattr(module, "_sample_metrics", spy_measure)
    dev = cross_validate(view_statistics([shard(i) for i in range(n)], "query"), SelectConfig(count=1))
    assert sorted(measured) == sorted(list(range(n)) * 3)
    assert dev["samples"] == n


def test_one_sample_cannot_be_held_out_and_the_record_says_so() -> None:
    dev = cross_validate(view_statistics([shard(0)], "query"), SelectConfig(count=1))
    assert dev == {"protocol": "none: fewer than two samples", "samples": 1}


@pytest.mark.parametrize(
    ("borda", "rrf", "share", "expected"),
    [
        ((0.50, 0.60), 0.55, 0.58, "borda"),
        ((0.50, 0.60), 0.60, 0.60, "borda"),
        ((0.50, 0.60), 0.55, 0.61, "share"),
        ((0.50, 0.60), 0.63, 0.61, "rrf"),
        ((0.70, 0.80), 0.10, 0.20, "borda"),
    ],
)
def test_the_papers_vote_stays_unless_another_is_above_its_interval(
    borda: tuple[float, float], rrf: float, share: float, expected: str
) -> None:
    def metric(mean: float, high: float = 1.0) -> dict[str, Any]:
        return {"NDCG@2": {"mean": mean, "low": 0.0, "high": high}}

    dev = {"aggregations": {"borda": metric(*borda), "rrf": metric(rrf), "share": metric(share)}}
    assert module._best_aggregation(dev, 2) == expected


def test_metrics_of_a_sample_are_those_of_its_rankings() -> None:
    statistics = view_statistics([shard(0), shard(1)], "query")
    means = torch.zeros((2, 2, 2, 4))
    means[0, 1, 0] = torch.tensor([4.0, 3.0, 2.0, 1.0])  # gold first: AP 1
    means[1, 1, 0] = torch.tensor([2.0, 3.0, 4.0, 1.0])  # gold third: AP 1/3
    changed = module.ViewStatistics(
        (means.double(), statistics.means[1]),
        statistics.gold,
        statistics.active,
        statistics.gold_mean,
        statistics.precision,
    )
    metrics = module._sample_metrics(changed, 0, [HeadId(1, 0)], "borda", 2)
    assert metrics["MAP"] == pytest.approx((1 + 1 / 3) / 2)
    assert metrics["R@2"] == pytest.approx(0.5)
