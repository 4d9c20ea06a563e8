"""Banks for engines whose heads are known."""

from headbank.bank import Bank
from headbank.types import HeadId, HeadSet, ModelInfo, View


def bank_of(
    info: ModelInfo, heads: tuple[HeadId, ...], views: tuple[View, ...] = ("query", "response")
) -> Bank:
    """A bank in which the given heads vote in every given view."""
    sets = {
        f"expert.{view}": HeadSet(f"expert.{view}", view, heads, "borda", strict_experts=0) for view in views
    }
    return Bank(info, "joint", sets, maps={}, training={})
