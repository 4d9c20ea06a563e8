"""Every error this project raises on purpose.

    HeadRankError
    ├── InputError            a caller's value is wrong; names the field and the limit
    │   └── InputTooLong      a caller's value is over a size limit
    ├── DataError             a data file cannot be read; names the file and the line
    ├── ModelError            a model cannot be fetched or loaded
    │   └── UnsupportedModel  it loads, but its attention cannot be tapped
    ├── BankError             a head bank is missing or damaged
    │   └── BankMismatch      it belongs to another model, tokenizer or template
    └── EngineError           the engine could not answer a good request
        ├── EngineUnavailable the worker is starting, stopping or gone
        ├── EngineOverloaded  the queue is full
        └── NonFiniteScore    a score was NaN or infinite

Messages name fields, numbers and files; they never repeat a caller's text.
"""


class HeadRankError(Exception):
    """Base of all errors below."""


class InputError(HeadRankError):
    """A caller's value is wrong.

    `field` is the name the caller used, `limit` the bound that was broken (None where there is none).
    """

    def __init__(self, field: str, message: str, limit: int | float | None = None) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.limit = limit

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.field, self.message, self.limit)


class InputTooLong(InputError):
    """A caller's value is over a size limit."""


class DataError(HeadRankError):
    """A data file cannot be read."""

    def __init__(self, path: str, message: str, line: int | None = None) -> None:
        where = path if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {message}")
        self.path = path
        self.line = line

    def __reduce__(self) -> tuple[object, ...]:
        return HeadRankError, (str(self),)


class ModelError(HeadRankError):
    """A model cannot be fetched or loaded."""


class UnsupportedModel(ModelError):
    """The model loads, but its attention cannot be tapped."""


class BankError(HeadRankError):
    """A head bank is missing or damaged."""


class BankMismatch(BankError):
    """The bank belongs to another model, tokenizer or template; `field` says which part differs."""

    def __init__(self, field: str, expected: object, found: object, hint: str) -> None:
        super().__init__(
            f"the bank does not fit the model: {field} is {found!r}, the bank has {expected!r}; {hint}"
        )
        self.field = field

    def __reduce__(self) -> tuple[object, ...]:
        return BankError, (str(self),)


class EngineError(HeadRankError):
    """The engine could not answer a good request."""


class EngineUnavailable(EngineError):
    """The worker is starting, stopping or gone."""


class EngineOverloaded(EngineError):
    """The queue is full; try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NonFiniteScore(EngineError):
    """A score was NaN or infinite."""
