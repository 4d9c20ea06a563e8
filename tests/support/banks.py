"""Banks for engines whose heads are known."""

from collections.abc import Sequence

from headbank.bank import Bank
from headbank.types import JOINT, HeadId, HeadSet, ModelInfo, PromptStyle, View


def bank_of(
    info: ModelInfo,
    heads: tuple[HeadId, ...],
    views: Sequence[View] = ("query", "response"),
    styles: Sequence[PromptStyle] = (JOINT,),
) -> Bank:
    """A bank in which the given heads vote in every given view and prompt; the first prompt is the default."""
    sets = [
        HeadSet(f"expert.{view}.{style.layout}", "expert", view, heads, "borda", style)
        for view in views
        for style in styles
    ]
    return bank_of_sets(info, sets)


def bank_of_sets(info: ModelInfo, sets: Sequence[HeadSet]) -> Bank:
    """A bank of the given head sets; the first of a view is its default."""
    defaults: dict[View, str] = {heads.view: heads.name for heads in reversed(sets)}
    return Bank(info, {heads.name: heads for heads in sets}, {}, defaults, maps={}, training={})
