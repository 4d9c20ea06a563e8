"""Read questions with candidate documents from the files that datasets publish.

Three formats, told apart by the fields of each item, in a JSON list or one item a line:

* HotpotQA and 2WikiMultihopQA: `context` and `supporting_facts`, as pairs (the published files) or as
  parallel lists (the same data exported from the hub);
* MuSiQue: `paragraphs`;
* plain: `{question | query, answer?, id?, dataset?, documents: [{id?, title?, text, gold? | relevance?}]}`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from headbank.errors import DataError
from headbank.types import Document, Sample

_PEEK_BYTES = 4096


def _as_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


def _as_pairs(value: Any) -> Any:
    """Turn the hub's two parallel lists into pairs; leave pairs as they are."""
    if not isinstance(value, dict):
        return value
    titles = value.get("title")
    others = value.get("sentences", value.get("sent_id"))
    if not isinstance(titles, list) or not isinstance(others, list) or len(titles) != len(others):
        raise ValueError("needs 'title' and 'sentences' (or 'sent_id'), two lists of one length")
    return list(zip(titles, others, strict=True))


_Id = Annotated[StrictStr | None, BeforeValidator(_as_text)]
_Question = Annotated[str, StringConstraints(strict=True, strip_whitespace=True, min_length=1)]


class _PlainDocument(BaseModel):
    id: _Id = None
    title: StrictStr | None = None
    text: StrictStr
    gold: StrictBool | None = None
    relevance: StrictInt | None = None

    @model_validator(mode="after")
    def _agree(self) -> "_PlainDocument":
        if self.gold is not None and self.relevance is not None and self.gold != (self.relevance > 0):
            raise ValueError("gold and relevance contradict each other")
        return self


class _Plain(BaseModel):
    id: _Id = None
    question: _Question = Field(validation_alias=AliasChoices("question", "query"))
    answer: StrictStr | None = None
    dataset: StrictStr = ""
    documents: Annotated[list[_PlainDocument], Field(min_length=1)]

    def sample(self, id: str) -> Sample:
        taken: set[str] = set()
        documents = []
        for i, d in enumerate(self.documents):
            relevance = int(d.gold or False) if d.relevance is None else d.relevance
            name = _unique(d.id or f"{id}-{i}", i, taken)
            documents.append(Document(d.text, d.title or "", name, gold=relevance > 0, relevance=relevance))
        return Sample(id, self.question, tuple(documents), self.answer, self.dataset)


class _Hotpot(BaseModel):
    id: _Id = Field(default=None, validation_alias=AliasChoices("_id", "id"))
    question: _Question
    answer: StrictStr | None = None
    context: Annotated[
        list[tuple[StrictStr, list[StrictStr]]], BeforeValidator(_as_pairs), Field(min_length=1)
    ]
    supporting_facts: Annotated[list[tuple[StrictStr, StrictInt]], BeforeValidator(_as_pairs)]
    evidences: Any = None

    def sample(self, id: str) -> Sample:
        golds = {title for title, _ in self.supporting_facts}
        documents = tuple(
            Document(
                _joined(sentences), title, f"{id}-{i}", gold=title in golds, relevance=int(title in golds)
            )
            for i, (title, sentences) in enumerate(self.context)
        )
        dataset = "hotpotqa" if self.evidences is None else "2wikimultihopqa"
        return Sample(id, self.question, documents, self.answer, dataset)


class _Paragraph(BaseModel):
    title: StrictStr
    paragraph_text: StrictStr
    is_supporting: StrictBool


class _MuSiQue(BaseModel):
    id: _Id = None
    question: _Question
    answer: StrictStr | None = None
    paragraphs: Annotated[list[_Paragraph], Field(min_length=1)]

    def sample(self, id: str) -> Sample:
        documents = tuple(
            Document(
                p.paragraph_text, p.title, f"{id}-{i}", gold=p.is_supporting, relevance=int(p.is_supporting)
            )
            for i, p in enumerate(self.paragraphs)
        )
        return Sample(id, self.question, documents, self.answer, "musique")


_FORMATS: dict[str, type[_Plain] | type[_Hotpot] | type[_MuSiQue]] = {
    "documents": _Plain,
    "paragraphs": _MuSiQue,
    "context": _Hotpot,
}


def read_samples(path: str | Path, limit: int | None = None) -> list[Sample]:
    """Read the first `limit` samples of a file (None: all of them).

    Missing or repeated ids are replaced, so that every sample has its own, and every document within its
    sample. Raises DataError naming the file, the line or item, and the field that is missing or wrong.
    """
    name = str(path)
    samples: list[Sample] = []
    taken: set[str] = set()
    try:
        for index, (line, where, item) in enumerate(islice(_items(Path(path)), limit)):
            parsed = _parse(name, line, where, item)
            samples.append(parsed.sample(_unique(parsed.id or str(index), index, taken)))
    except OSError as error:
        raise DataError(name, f"cannot be read: {error.strerror}") from error
    return samples


def data_hash(path: str | Path) -> str:
    """sha256 of the file's bytes, in hex. Raises DataError when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(str(path), f"cannot be read: {error.strerror}") from error


def _items(path: Path) -> Iterator[tuple[int | None, str, Any]]:
    """Yield (line number or None, prefix for messages, item); lines are read one by one, a list at once."""
    name = str(path)
    with path.open("rb") as file:
        start = file.read(_PEEK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if start.startswith(b"["):
            items = _decode(name, None, file.read())
            if not items:
                raise DataError(name, "holds an empty list")
            for number, item in enumerate(items, 1):
                yield None, f"item {number}: ", item
            return
        found = False
        for number, line in enumerate(file, 1):
            if line.strip():
                found = True
                yield number, "", _decode(name, number, line)
        if not found:
            raise DataError(name, "is empty")


def _decode(name: str, line: int | None, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        raise DataError(name, f"is not JSON ({error.msg})", line or error.lineno) from error
    except UnicodeDecodeError as error:
        raise DataError(name, "is not UTF-8", line) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand open brackets
        raise DataError(name, "is not JSON that can be read", line) from error


def _parse(name: str, line: int | None, where: str, item: Any) -> _Plain | _Hotpot | _MuSiQue:
    if not isinstance(item, dict):
        raise DataError(name, f"{where}is not a JSON object", line)
    form = next((form for field, form in _FORMATS.items() if field in item), None)
    if form is None:
        raise DataError(name, f"{where}has none of the fields {', '.join(_FORMATS)}", line)
    try:
        return form.model_validate(item)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(name, f"{where}{place}: {first['msg']}", line) from error


def _unique(wanted: str, index: int, taken: set[str]) -> str:
    while wanted in taken:
        wanted = f"{wanted}-{index}"
    taken.add(wanted)
    return wanted


def _joined(sentences: Sequence[str]) -> str:
    """Sentences as published: HotpotQA's begin with their space, 2WikiMultihopQA's have none between them."""
    text = ""
    for sentence in sentences:
        glued = text and sentence and not (text[-1].isspace() or sentence[0].isspace())
        text += f" {sentence}" if glued else sentence
    return text
