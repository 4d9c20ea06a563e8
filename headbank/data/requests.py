"""Reads what `headrank rerank` is given: documents as lines or JSONL, or whole requests as JSONL."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, StrictStr, ValidationError

from headbank.errors import DataError, InputError
from headbank.types import Document


@dataclass(frozen=True)
class RankRequest:
    """A query with its documents."""

    query: str
    documents: tuple[str, ...]


_Parsed = TypeVar("_Parsed", bound=BaseModel)


class _Document(BaseModel):
    text: StrictStr
    title: StrictStr = ""


class _Request(BaseModel):
    # An unknown key (`top_n`, `model`) would otherwise be ignored in silence.
    model_config = ConfigDict(extra="forbid")

    query: StrictStr
    documents: list[StrictStr | _Document]


def read_requests(lines: Iterable[str], query: str | None, name: str) -> list[RankRequest]:
    """Requests from text lines; `name` stands for the input in messages.

    With `query`, every line is a document: plain text, or, when the first line is a JSON object, an object `{text,
    title?}` a line. Without it, every line is an object `{query, documents: [text | {text, title?}, ...]}`. Blank lines
    are left out. Raises DataError naming the line and the field, InputError when the query is missing.
    """
    numbered = [
        (number, text)
        for number, line in enumerate(lines, 1)
        if (text := line.removeprefix("\ufeff").rstrip("\r\n")).strip()
    ]
    if query is None:
        if numbered and not numbered[0][1].lstrip().startswith("{"):
            raise InputError("query", "is needed when the input is not JSONL of requests")
        requests = [_parse(_Request, line, name, number) for number, line in numbered]
        return [RankRequest(r.query, tuple(_content(d) for d in r.documents)) for r in requests]
    if numbered and numbered[0][1].lstrip().startswith("{"):
        return [RankRequest(query, tuple(_content(_parse(_Document, line, name, n)) for n, line in numbered))]
    return [RankRequest(query, tuple(line for _, line in numbered))]


def _content(document: str | _Document) -> str:
    return document if isinstance(document, str) else Document(document.text, document.title).content


def _parse(kind: type[_Parsed], line: str, name: str, number: int) -> _Parsed:
    try:
        return kind.model_validate(json.loads(line))
    except json.JSONDecodeError as error:
        raise DataError(name, f"is not JSON ({error.msg})", number) from None
    except RecursionError:
        raise DataError(name, "is nested too deeply", number) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise DataError(name, f"{'.'.join(map(str, first['loc']))}: {first['msg']}", number) from None
