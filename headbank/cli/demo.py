"""`headrank demo`: see the whole thing work on documents that ship with the package."""

from typing import Annotated

import typer
from rich.console import Console

from headbank.cli.common import ThreadsOption, ViewOption, parse_choice
from headbank.cli.rerank import open_reranker, print_ranking
from headbank.data.demo import load_demo
from headbank.data.requests import RankRequest
from headbank.models.catalogue import DEFAULT_EMBEDDING, DEFAULT_MODEL
from headbank.types import VIEWS, RankOptions


def demo_command(
    model: Annotated[
        str, typer.Option("--model", help="Catalogue name of a model with a shipped bank.")
    ] = DEFAULT_MODEL,
    view: ViewOption = "query",
    threads: ThreadsOption = None,
) -> None:
    """Fetch the default model if needed and rank the demo documents by its shipped head bank."""
    from headbank.cli.pull import pull_command
    from headbank.models.catalogue import CATALOGUE

    options = RankOptions(view=parse_choice("view", view, VIEWS) or "query", explain=True)
    if model in CATALOGUE:
        pull_command(model, None)
    console = Console()
    reranker = open_reranker("heads", model, None, DEFAULT_EMBEDDING, options, threads=threads)
    right = 0
    for question in load_demo():
        request = RankRequest(question.query, question.documents)
        ranking = reranker.rank(question.query, question.documents, options)
        print_ranking(console, ranking, request, None)
        found = [i for i in question.expected if i in ranking.order[: len(question.expected)]]
        right += len(found)
        console.print(f"documents with the answer: {', '.join(map(str, question.expected))}; "
                      f"{len(found)} of {len(question.expected)} ranked first\n")  # fmt: skip
    total = sum(len(question.expected) for question in load_demo())
    console.print(f"{right} of {total} answer documents ranked first, on {model} by attention heads alone")
