"""A few questions over invented places, people and products, to try a method on within seconds."""

from importlib.resources import as_file, files
from typing import NamedTuple

from headbank.data.readers import read_samples


class DemoQuestion(NamedTuple):
    """A query, its documents, and the indices of the documents that a good method puts first."""

    query: str
    documents: tuple[str, ...]
    expected: tuple[int, ...]


def load_demo() -> list[DemoQuestion]:
    """The questions of `demo.json`: one lookup, one over two documents in a chain, one comparison."""
    with as_file(files("headbank.data") / "demo.json") as path:
        samples = read_samples(path)
    return [DemoQuestion(s.question, tuple(d.content for d in s.documents), s.golds) for s in samples]
