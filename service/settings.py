"""Every setting of the service: an environment variable `HEADRANK_<NAME>` and a flag of `headrank serve`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from headbank.models.catalogue import DEFAULT_EMBEDDING, DEFAULT_MODEL
from headbank.types import View

ENV_PREFIX = "HEADRANK_"

Method = Literal["heads", "icr", "fusion", "llm", "bm25", "dense"]
WHOLE_MODEL_METHODS: tuple[Method, ...] = ("icr", "llm")
"""They read or write with all layers, which `views=query` does not load."""

Views = Literal["both", "query"]
LogLevel = Literal["critical", "error", "warning", "info", "debug"]


class Settings(BaseSettings):
    """What an operator can choose. The descriptions are the help texts and the table in the README."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True)

    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="Model whose heads rank: a catalogue name, hub id, folder, GGUF file, or `fake` (no "
        "weights). Larger models rank better and cost more time and memory.",
    )
    bank: Path | None = Field(
        None,
        description="Head bank of the model: its folder, or a folder of banks. Unset: the banks inside the "
        "package.",
    )
    host: str = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0 reaches other machines, set api_keys then.",
    )
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="Accepted API keys, separated by commas; several allow a change of keys without "
        "downtime. Unset: open to everyone. A flag can be seen in the list of processes, the variable "
        "cannot.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = Field(
        "auto",
        description="Number format of the weights; 16 bits halve the memory, but are slow on processors "
        "without them. `auto`: bfloat16 where the hardware multiplies it, else float32.",
    )
    device: str = Field(
        "auto", description="`cpu`, `cuda`, `cuda:1`, ...; `auto`: the GPU where there is one."
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="Processor threads of the model. Unset: all cores, which is fastest for one service "
        "alone on the machine; give neighbours room with fewer.",
    )
    document_cache_bytes: int = Field(
        2**30,
        ge=0,
        description="Memory for the keys and values of documents of the layout `parallel`, on the device: a "
        "document that comes back, under any query, is then not read again. More keeps more documents, and leaves "
        "less for long requests; `/metrics` shows hits and misses. 0 keeps none.",
    )
    host_cache_bytes: int = Field(
        0,
        ge=0,
        description="Pinned memory of the host, on a machine with a GPU, for documents that fall out of "
        "document_cache_bytes: copying them back is slower than keeping them on the GPU and faster than reading "
        "them again. 0, or no GPU: they are dropped.",
    )
    default_method: Method = Field("heads", description="Method of requests that name none.")
    dense_model: str = Field(
        DEFAULT_EMBEDDING,
        min_length=1,
        description="Embedding model of method `dense`; loaded, in addition, when the first request asks "
        "for it. Method `fusion` takes the one that its head bank names.",
    )
    max_documents: int = Field(
        1000,
        ge=1,
        description="Most documents in a request, over which it is refused with 413. More also take longer, "
        "and everyone behind them waits.",
    )
    max_body_bytes: int = Field(
        8_000_000,
        ge=1000,
        description="Largest request body, over which it is refused with 413. Bounds the memory of a "
        "request.",
    )
    max_query_chars: int = Field(
        32_000,
        ge=1,
        description="Longest query, over which it is refused with 413; a query is never cut.",
    )
    max_tokens_per_doc: int = Field(
        2048,
        ge=1,
        description="A longer document is cut to this many tokens, and the answer says so. Requests can ask "
        "for less, not for more. Less is faster, but blind to the end of long documents.",
    )
    default_view: View = Field(
        "query",
        description="Rows that vote for requests that name none: `query` needs no generation and is fastest, "
        "`response` reads the heads while the model answers, which is slower and often better.",
    )
    views: Views = Field(
        "both",
        description="Views that are served. `query` loads only the layers up to the deepest voting head, when the "
        "head bank can be found by the name of the model: less memory and a faster start, but requests for the view "
        "`response` and the methods `icr` and `llm` are refused with 422.",
    )
    response_tokens: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Most tokens that the model writes for the response view; each costs one step. Unset: as many "
        "as the heads were calibrated with.",
    )
    batch_tokens: int = Field(
        16384,
        ge=1,
        description="Requests that wait are answered together up to about this many tokens (4 bytes of text count "
        "as one). More gets through more requests in a second where they share documents or a GPU; less answers "
        "the first of them sooner. A larger request goes alone; 1: one request at a time.",
    )
    queue_requests: int = Field(
        64,
        ge=1,
        description="Most requests waiting for the engine, over which they are refused with 429. More "
        "absorb longer bursts, but wait longer.",
    )
    request_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Seconds from the arrival of a request to its answer, after which it gets 504. Below "
        "the timeout of your clients, so that nobody computes for a caller who has left.",
    )
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds the engine may take to load; after that the start has failed.",
    )
    warm_up: bool = Field(
        True,
        description="Rank a small example before reporting ready: the start takes longer, the first request "
        "doesn't.",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        description="Name of the model in answers and in /v1/models. Unset: the value of model.",
    )
    strict_model_name: bool = Field(
        False,
        description="Refuse requests that name another model with 404. Off, because rerank clients send the "
        "names of hosted models.",
    )
    log_level: LogLevel = Field("info", description="Least severity of messages that are logged.")

    @field_validator("api_keys", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            keys = tuple(key for part in value.split(",") if (key := part.strip()))
            if value.strip() and not keys:
                raise ValueError("holds no key")
            return keys
        return value

    @field_validator("views")
    @classmethod
    def _serves_its_defaults(cls, value: Views, info: ValidationInfo) -> Views:
        if value == "query":
            if info.data.get("default_view") == "response":
                raise ValueError("query does not serve the default_view response")
            if info.data.get("default_method") in WHOLE_MODEL_METHODS:
                raise ValueError(f"query does not serve the default_method {info.data['default_method']}")
        return value

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self.served_model_name or self.model


def env_name(field: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + field.upper()


def flag_name(field: str) -> str:
    """The flag of a setting."""
    return "--" + field.replace("_", "-")


def default_text(field: str) -> str:
    """The default of a setting as a user would write it; empty where unset."""
    value = Settings.model_fields[field].default
    if value is None or value == ():
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings_table() -> str:
    """All settings as a Markdown table."""
    rows = ["| flag | variable | default | what it does |", "| --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = f"`{default_text(name)}`" if default_text(name) else "unset"
        rows.append(f"| `{flag_name(name)}` | `{env_name(name)}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"
