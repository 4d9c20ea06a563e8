"""Requests and answers on the wire, as pydantic models: the checks of the dialects and the shapes in the
OpenAPI file.

Absent and null mean the same in every optional field of a request.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from headbank.types import Aggregation, Layout, View
from service.settings import Method


def _not_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


Count = Annotated[int, BeforeValidator(_not_boolean), Field(ge=1)]
"""A whole number from 1; `"2"` and `2.0` are taken, `true` is not."""

_EXAMPLE_QUERY = "What is the capital of France?"
_EXAMPLE_DOCUMENTS: list[JsonValue] = ["Berlin is a city in Germany.", "The capital of France is Paris."]


class RerankRequest(BaseModel):
    """A request in Cohere's dialect, with what Jina, vLLM and Voyage clients add, and our extras."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={
            "examples": [
                {"model": "rerank", "query": _EXAMPLE_QUERY, "documents": _EXAMPLE_DOCUMENTS, "top_n": 1},
                {
                    "query": _EXAMPLE_QUERY,
                    "documents": _EXAMPLE_DOCUMENTS,
                    "method": "heads",
                    "explain": True,
                },
            ]
        },
    )

    model: str | None = Field(
        None, description="Any name is taken, unless the service is strict; the answer tells what is served."
    )
    query: str = Field(description="The question. Never cut.")
    documents: list[Any] = Field(
        description="Candidates: strings, or objects of which `text` is ranked, or the fields in "
        "`rank_fields`.",
        json_schema_extra={"items": {"anyOf": [{"type": "string"}, {"type": "object"}]}},
    )
    top_n: Count | None = Field(
        None,
        validation_alias=AliasChoices("top_n", "top_k"),
        description="Length of the answer; all documents when absent or larger. `top_k` is an alias.",
    )
    return_documents: bool = Field(False, description="Send the documents back in the answer.")
    rank_fields: list[str] | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="Fields of object documents that are ranked, in this order.",
    )
    max_tokens_per_doc: Count | None = Field(
        None,
        description="Longer documents are cut, which the answer says. The service's own limit holds as well.",
    )
    priority: Any = Field(None, description="Accepted and without effect.")
    max_chunks_per_doc: Any = Field(None, description="Accepted and without effect.")
    method: Method | None = Field(
        None,
        description="How to rank; the service's default when absent. `heads`: the head bank's heads vote; `icr`: all "
        "heads of the model, nothing selected; `fusion`: heads and other voters with the bank's weights; `llm`: the "
        "model writes the order; `bm25`: words in common; `dense`: an embedding model. `/info` lists those available.",
    )
    view: View | None = Field(
        None,
        description="Whose attention votes (methods heads and fusion): the query's, or that of the answer which the "
        "model writes.",
    )
    layout: Layout | None = Field(
        None,
        description="How the model reads the documents (methods heads, icr and fusion): `joint` one after the other, "
        "`parallel` each on its own, so that their order changes no score and a document that comes back is not "
        "read again. What the head bank names when absent; `joint` for icr.",
    )
    aggregation: Aggregation | None = Field(
        None,
        description="How the heads' votes are counted (methods heads and icr); what the head bank names when absent. "
        "`borda` and `rrf` are shares of points and `share` is a share of attention: all compare documents of one "
        "request only. `evidence` is the probability of relevance, comparable between requests; `calibrated` is the "
        "attention less that of an empty query (view `query` only), on an open scale.",
    )
    raw_scores: bool = Field(
        False,
        description="Give what the scores were made of, on an open scale, where the method has it: the log-odds of "
        "`evidence` and fusion, the sums of bm25. The order is the same.",
    )
    explain: bool = Field(False, description="Add every head's vote and the passages that the heads look at.")


class TeiRequest(BaseModel):
    """A request of Text Embeddings Inference's clients."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={
            "examples": [{"query": _EXAMPLE_QUERY, "texts": _EXAMPLE_DOCUMENTS, "return_text": True}]
        },
    )

    query: str = Field(description="The question. Never cut.")
    texts: list[Any] = Field(
        description="Candidates.",
        json_schema_extra={"items": {"type": "string"}},
    )
    truncate: bool = Field(True, description="Cut longer texts; if false, they are an error.")
    truncation_direction: Literal["Right", "right", "Left", "left"] = Field(
        "Right", description="Texts are cut at the right; `Left` is an error when one is too long."
    )
    raw_scores: bool = Field(
        False,
        description="Give what the scores were made of, on an open scale, where the method has it; the order is the "
        "same.",
    )
    return_text: bool = Field(False, description="Send the texts back in the answer.")


class Vote(BaseModel):
    """How one head voted on one document."""

    head: str = Field(examples=["L14H22"])
    rank: int = Field(description="1 is best.")
    mass: float = Field(description="Attention on the document, summed over its tokens.")
    mean: float = Field(description="`mass` divided by the number of tokens.")


class Evidence(BaseModel):
    """A passage of a document that the voting heads look at."""

    start: int = Field(description="First character.")
    end: int = Field(description="Behind the last character.")
    text: str
    weight: float = Field(description="Share of the document's attention that falls on the passage.")


class Result(BaseModel):
    """One ranked document."""

    index: int = Field(description="Position in the request, from 0.")
    relevance_score: float = Field(
        description="From 0 to 1, except with `raw_scores` and the aggregation `calibrated`. Comparable within one "
        "answer; between answers too with the aggregation `evidence`."
    )
    document: dict[str, Any] | None = Field(None, description="Only present when asked for; has `text`.")
    votes: list[Vote] | None = Field(None, description="Only present with `explain`.")
    snippets: list[Evidence] | None = Field(None, description="Only present with `explain`.")


class Usage(BaseModel):
    """Tokens that the model read."""

    prompt_tokens: int
    total_tokens: int


class ApiVersion(BaseModel):
    """Cohere's version of the dialect."""

    version: str


class BilledUnits(BaseModel):
    """Cohere's unit of search: up to 100 documents."""

    search_units: int


class Tokens(BaseModel):
    """Tokens that the model read."""

    input_tokens: int


class Meta(BaseModel):
    """What there is to say about the answer as a whole."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: Tokens
    method: Method
    warnings: list[str] | None = Field(None, description="Only present when documents were cut.")


class RerankResponse(BaseModel):
    """The answer that Cohere's, Jina's and vLLM's clients all read; best document first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[Result]
    usage: Usage
    meta: Meta


class TeiRank(BaseModel):
    """One ranked text."""

    index: int = Field(description="Position in the request, from 0.")
    score: float
    text: str | None = Field(None, description="Only present with `return_text`.")


class ErrorDetail(BaseModel):
    """The error as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(BaseModel):
    """An error for every dialect but TEI's."""

    id: str
    message: str
    detail: str
    error: ErrorDetail


class TeiErrorResponse(BaseModel):
    """An error of Text Embeddings Inference."""

    error: str
    error_type: str


class Health(BaseModel):
    """The process lives."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """Whether requests are answered now, and if not, why."""

    ready: bool
    state: Literal["starting", "ready", "restarting", "failed", "stopped"]
    reason: str = ""


class ServedView(BaseModel):
    """What votes in a view where a request names no layout."""

    head_set: str = Field(examples=["expert.query.parallel"])
    layout: Layout


class ServedModel(BaseModel):
    """A model as OpenAI's clients list it, and what requests can choose."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Start of the service, in seconds since 1970.")
    owned_by: str = "headrank"
    methods: list[Method] = Field([], description="Empty until the model is loaded.")
    views: dict[View, ServedView] = Field({}, description="Empty until the model is loaded.")


class ServedModels(BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


class HeadSetInfo(BaseModel):
    """The heads that vote in one view and layout."""

    name: str
    view: View
    layout: Layout
    heads: list[str] = Field(examples=[["L14H22"]])
    default_aggregation: Aggregation
    strict_experts: int


class Limits(BaseModel):
    """What a request may not exceed."""

    max_body_bytes: int
    max_documents: int
    max_query_chars: int
    max_tokens_per_doc: int
    request_timeout_s: float


class Info(BaseModel):
    """Text Embeddings Inference's description of a server, and below it ours."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any] = Field(examples=[{"reranker": {"id2label": {}, "label2id": {}}}])
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    methods: list[Method] = Field(
        description="`dense` may still lack its model, which is loaded at its first use."
    )
    default_method: Method
    default_view: View
    views: dict[View, ServedView]
    head_sets: list[HeadSetInfo] = Field(description="What the fields `view` and `layout` choose from.")
    limits: Limits
