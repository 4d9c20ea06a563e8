"""Dialects of rerank clients: a body becomes a `RerankCall`, a ranking becomes an answer, an error its shape.

A further dialect is one more class with these methods and its name in `service.routes.rerank`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from headbank.errors import InputError, InputTooLong
from headbank.types import Ranking, RankOptions, View
from service.body import MAX_DEPTH, depth_within
from service.errors import EmptyInput, Failure, UnknownModel, cohere_body, tei_body
from service.schemas import RerankRequest, TeiRequest
from service.settings import Method, Settings

DOCUMENTS_PER_SEARCH_UNIT = 100

Request = TypeVar("Request", bound=BaseModel)


@dataclass(frozen=True)
class RerankCall:
    """What a caller wants, whatever words it was said in."""

    query: str
    documents: tuple[str, ...]
    """The strings that are ranked."""
    echo: tuple[Mapping[str, Any], ...]
    """What is sent back for each document; has `text`."""
    method: Method
    options: RankOptions
    top_n: int | None = None
    return_documents: bool = False
    may_cut: bool = True
    """Whether a document over the token limit is cut or refused."""
    raw_scores: bool = False
    """Whether the scores on an open scale are wanted, where the method has some."""

    def scores(self, ranking: Ranking) -> tuple[float, ...]:
        """The scores that go into the answer. [D]"""
        return (ranking.raw_scores if self.raw_scores else None) or ranking.scores


@dataclass(frozen=True)
class Outcome:
    """What became of a call."""

    ranking: Ranking
    request_id: str
    total_s: float
    """Seconds since the request arrived."""


@dataclass(frozen=True)
class Reply:
    """Body and headers of an answer."""

    body: Any
    headers: dict[str, str] = field(default_factory=dict)


class Dialect(Protocol):
    """One family of rerank clients."""

    @property
    def name(self) -> str:
        """Label in the metrics."""
        ...

    def accepts(self, body: Mapping[str, Any]) -> bool:
        """Whether the body's keys are of this dialect."""
        ...

    def parse(self, body: Mapping[str, Any]) -> RerankCall:
        """Check a body. Raises InputError and its subclasses."""
        ...

    def render(self, call: RerankCall, outcome: Outcome) -> Reply:
        """The answer. Raises InputError when documents were cut that may not be."""
        ...

    def render_error(self, failed: Failure) -> Any:
        """The body of an error."""
        ...


class Cohere:
    """Cohere v1 and v2, with the additions of Jina, vLLM and Voyage; only the version in `meta` differs."""

    def __init__(self, settings: Settings, version: str) -> None:
        self._settings = settings
        self._version = version
        self.name = f"cohere_v{version}"

    def accepts(self, body: Mapping[str, Any]) -> bool:
        """Any body: this is the default dialect."""
        del body
        return True

    def parse(self, body: Mapping[str, Any]) -> RerankCall:
        """Check a Cohere body."""
        request = _validated(RerankRequest, body)
        settings = self._settings
        if settings.strict_model_name and request.model not in (None, settings.model_name):
            raise UnknownModel("model", "is not served here; GET /v1/models lists what is")
        _check_sizes(settings, request.query, "documents", request.documents)
        documents, echo = _texts(request.documents, request.rank_fields)
        method = request.method or settings.default_method
        return RerankCall(
            query=request.query,
            documents=documents,
            echo=echo,
            method=method,
            options=RankOptions(
                view=request.view or _default_view(settings, method),
                aggregation=request.aggregation,
                layout=request.layout,
                max_tokens_per_doc=min(
                    request.max_tokens_per_doc or settings.max_tokens_per_doc, settings.max_tokens_per_doc
                ),
                explain=request.explain,
            ),
            top_n=request.top_n,
            return_documents=request.return_documents,
            raw_scores=request.raw_scores,
        )

    def render(self, call: RerankCall, outcome: Outcome) -> Reply:
        """The body that Cohere's, Jina's, vLLM's, LiteLLM's and the frameworks' clients all read.

        `document` is absent or an object, never null or a string.
        """
        ranking = outcome.ranking
        meta: dict[str, Any] = {
            "api_version": {"version": self._version},
            "billed_units": {"search_units": math.ceil(len(call.documents) / DOCUMENTS_PER_SEARCH_UNIT)},
            "tokens": {"input_tokens": ranking.input_tokens},
            "method": call.method,
        }
        if ranking.cut:
            places = ", ".join(map(str, ranking.cut))
            meta["warnings"] = [f"documents over the token limit were cut at their end, by index: {places}"]
        usage = {"prompt_tokens": ranking.input_tokens, "total_tokens": ranking.input_tokens}
        return Reply(
            {
                "id": outcome.request_id,
                "object": "list",
                "model": self._settings.model_name,
                "results": _cohere_results(call, ranking),
                "usage": usage,
                "meta": meta,
            }
        )

    def render_error(self, failed: Failure) -> Any:
        """Cohere's error and its relatives'."""
        return cohere_body(failed)


class Tei:
    """Hugging Face Text Embeddings Inference: `texts` in, a bare array out."""

    name = "tei"

    def __init__(self, settings: Settings, compute_type: Callable[[], str]) -> None:
        """`compute_type` tells the kind of hardware for the header of that name."""
        self._settings = settings
        self._compute_type = compute_type

    def accepts(self, body: Mapping[str, Any]) -> bool:
        """A body with `texts` and without `documents`."""
        return "texts" in body and "documents" not in body

    def parse(self, body: Mapping[str, Any]) -> RerankCall:
        """Check a TEI body."""
        request = _validated(TeiRequest, body)
        settings = self._settings
        _check_sizes(settings, request.query, "texts", request.texts)
        for index, text in enumerate(request.texts):
            if not isinstance(text, str):
                raise InputError(f"texts[{index}]", "must be a string")
        return RerankCall(
            query=request.query,
            documents=tuple(request.texts),
            echo=tuple({"text": text} for text in request.texts),
            method=settings.default_method,
            options=RankOptions(
                view=_default_view(settings, settings.default_method),
                max_tokens_per_doc=settings.max_tokens_per_doc,
            ),
            return_documents=request.return_text,
            may_cut=request.truncate and request.truncation_direction.lower() == "right",
            raw_scores=request.raw_scores,
        )

    def render(self, call: RerankCall, outcome: Outcome) -> Reply:
        """A bare array of all texts, times and sizes in the headers; times are whole milliseconds."""
        ranking = outcome.ranking
        if ranking.cut and not call.may_cut:
            raise InputError(
                f"texts[{ranking.cut[0]}]",
                "is over the token limit; only truncate=true with truncation_direction=Right cuts it",
                call.options.max_tokens_per_doc,
            )
        scores = call.scores(ranking)
        body = [
            {"index": i, "score": scores[i]} | (dict(call.echo[i]) if call.return_documents else {})
            for i in ranking.order
        ]
        seconds = ranking.seconds
        times = {
            "x-compute-time": outcome.total_s,
            "x-total-time": outcome.total_s,
            "x-tokenization-time": seconds.get("tokenise", 0.0),
            "x-queue-time": seconds.get("queue", 0.0),
            "x-inference-time": seconds.get("forward", 0.0) + seconds.get("vote", 0.0),
        }
        headers = {name: str(round(value * 1000)) for name, value in times.items()}
        headers["x-compute-type"] = self._compute_type()
        headers["x-compute-characters"] = str(len(call.query) + sum(map(len, call.documents)))
        headers["x-compute-tokens"] = str(ranking.input_tokens)
        return Reply(body, headers)

    def render_error(self, failed: Failure) -> Any:
        """TEI's error."""
        return tei_body(failed)


def _validated(schema: type[Request], body: Mapping[str, Any]) -> Request:
    """Validate, null read as absent. Raises InputError for the first problem, its value left out."""
    try:
        return schema.model_validate({key: value for key, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise InputError(place.removeprefix("."), first["msg"], first.get("ctx", {}).get("ge")) from None


def _default_view(settings: Settings, method: Method) -> View:
    """The view of requests that name none; icr has the query's only."""
    return "query" if method == "icr" else settings.default_view


def _check_sizes(settings: Settings, query: str, field_name: str, documents: list[Any]) -> None:
    if not query.strip():
        raise EmptyInput("query", "must not be empty")
    if len(query) > settings.max_query_chars:
        limit = settings.max_query_chars
        raise InputTooLong("query", f"must not be longer than {limit} characters", limit)
    if not documents:
        raise EmptyInput(field_name, "must not be empty")
    if len(documents) > settings.max_documents:
        limit = settings.max_documents
        raise InputTooLong(field_name, f"must not be more than {limit}", limit)


def _texts(
    documents: list[Any], rank_fields: list[str] | None
) -> tuple[tuple[str, ...], tuple[Mapping[str, Any], ...]]:
    """The strings to rank, and what to send back: an object whole, with `text` added where it has none."""
    texts: list[str] = []
    echo: list[Mapping[str, Any]] = []
    for index, document in enumerate(documents):
        if isinstance(document, str):
            texts.append(document)
            echo.append({"text": document})
        elif isinstance(document, dict):
            text = _ranked_text(document, rank_fields, f"documents[{index}]")
            texts.append(text)
            has_text = isinstance(document.get("text"), str)
            echo.append(document if has_text else document | {"text": text})
        else:
            raise InputError(f"documents[{index}]", "must be a string or an object")
    return tuple(texts), tuple(echo)


def _ranked_text(document: dict[str, Any], rank_fields: list[str] | None, place: str) -> str:
    if not depth_within(document, MAX_DEPTH):
        raise InputError(place, f"must not be nested deeper than {MAX_DEPTH}", MAX_DEPTH)
    if rank_fields is None:
        text = document.get("text")
        if not isinstance(text, str):
            raise InputError(f"{place}.text", "must be a string")
        return text
    values = []
    for number, name in enumerate(rank_fields):
        value = document.get(name)
        if not isinstance(value, str | int | float):
            raise InputError(place, f"has no text in the field that rank_fields[{number}] names")
        values.append(str(value))
    if len(values) == 1:
        return values[0]
    return "\n".join(f"{name}: {value}" for name, value in zip(rank_fields, values, strict=True))


def _cohere_results(call: RerankCall, ranking: Ranking) -> list[dict[str, Any]]:
    snippets: dict[int, list[dict[str, Any]]] = {}
    for s in ranking.snippets:
        passage = {"start": s.start, "end": s.end, "text": s.text, "weight": s.weight}
        snippets.setdefault(s.document, []).append(passage)
    scores = call.scores(ranking)
    results = []
    for index in ranking.order[: call.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if call.return_documents:
            result["document"] = dict(call.echo[index])
        if call.options.explain:
            result["votes"] = [
                {"head": str(v.head), "rank": v.ranks[index], "mass": v.mass[index], "mean": v.mean[index]}
                for v in ranking.votes
            ]
            result["snippets"] = snippets.get(index, [])
        results.append(result)
    return results
