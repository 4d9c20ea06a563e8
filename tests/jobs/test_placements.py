import pytest

from headbank.jobs.placements import placement_order, placement_positions
from headbank.types import Document, Sample


def sample(golds: int, distractors: int, id: str = "s") -> Sample:
    documents = [Document(f"gold {i}", gold=True) for i in range(golds)]
    documents += [Document(f"distractor {i}") for i in range(distractors)]
    return Sample(id, "question", tuple(documents))


@pytest.mark.parametrize(
    ("distractors", "count", "expected"),
    [
        (8, 9, (0, 1, 2, 3, 4, 5, 6, 7, 8)),
        (8, 3, (0, 4, 8)),
        (8, 2, (0, 8)),
        (8, 1, (4,)),
        (1, 2, (0, 1)),
        (9, 4, (0, 3, 6, 9)),
    ],
)
def test_positions_are_spread_from_front_to_back(
    distractors: int, count: int, expected: tuple[int, ...]
) -> None:
    assert placement_positions(distractors, count) == expected


@pytest.mark.parametrize(("distractors", "count"), [(2, 4), (0, 2), (3, 0)])
def test_more_placements_than_places_are_refused(distractors: int, count: int) -> None:
    with pytest.raises(ValueError, match="placements"):
        placement_positions(distractors, count)


@pytest.mark.parametrize("position", range(5))
def test_the_golds_stand_as_a_block_before_distractor_p(position: int) -> None:
    order = placement_order(sample(2, 4), position, seed=3)
    assert sorted(order) == [0, 1, 2, 3, 4, 5]
    assert order[position : position + 2] == (0, 1)


def test_distractors_keep_one_order_in_every_placement_of_a_sample() -> None:
    orders = [placement_order(sample(2, 6), p, seed=1) for p in range(7)]
    without_golds = {tuple(i for i in order if i > 1) for order in orders}
    assert len(without_golds) == 1


def test_the_order_depends_on_seed_and_sample_alone() -> None:
    assert placement_order(sample(2, 8), 4, 0) == placement_order(sample(2, 8), 4, 0)
    assert placement_order(sample(2, 8), 4, 0) != placement_order(sample(2, 8), 4, 1)
    assert placement_order(sample(2, 8), 4, 0) != placement_order(sample(2, 8, id="t"), 4, 0)
