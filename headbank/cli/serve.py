"""`headrank serve`: every setting of the service is a flag; the flags are made from the settings."""

import inspect
from types import NoneType
from typing import Annotated, Any, get_args

import typer
from pydantic import ValidationError

from headbank.cli.auto import DEFAULT_SAMPLES, calibrate_hint, ensure_bank
from headbank.errors import BankError
from service.settings import Settings, default_text, env_name, flag_name


def serve_command(*, auto_calibrate: bool, auto_calibrate_samples: int, **flags: Any) -> None:
    """Start the HTTP service. Flags go before environment variables; /docs describes the API."""
    settings = _settings({name: value for name, value in flags.items() if value is not None})
    if auto_calibrate:
        settings = _with_bank(settings, auto_calibrate_samples)
    # Imported here, so that the other commands do without it.
    from service.server import serve

    try:
        serve(settings)
    except BankError as error:
        raise BankError(f"{error}; {calibrate_hint(settings.model, settings.bank)}") from error


def _with_bank(settings: Settings, samples: int) -> Settings:
    """The settings with a bank that fits the model, made now where there is none."""
    bank = ensure_bank(
        settings.model,
        settings.bank,
        settings.default_view,
        samples,
        settings.dtype,
        settings.device,
        settings.threads,
    )
    return settings.model_copy(update={"bank": bank})


def _settings(given: dict[str, Any]) -> Settings:
    """Settings from flags and the environment. Raises BadParameter that names the flag and the variable."""
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        raise typer.BadParameter(f"{flag_name(name)} ({env_name(name)}): {first['msg']}") from None


def _parameters() -> list[inspect.Parameter]:
    parameters = [
        _parameter(
            "auto_calibrate",
            bool,
            False,
            typer.Option(
                "--auto-calibrate",
                envvar=env_name("auto_calibrate"),
                help="Where the model has no head bank, make one on synthetic questions first: into bank, or "
                "into ~/.cache/headrank/banks where that is unset. A later start finds it there.",
            ),
        ),
        _parameter(
            "auto_calibrate_samples",
            int,
            DEFAULT_SAMPLES,
            typer.Option(
                "--auto-calibrate-samples",
                envvar=env_name("auto_calibrate_samples"),
                min=2,
                help="How many questions that takes.",
            ),
        ),
    ]
    for name, field in Settings.model_fields.items():
        flag = flag_name(name)
        is_switch = field.annotation is bool
        option = typer.Option(
            f"{flag}/--no-{flag.removeprefix('--')}" if is_switch else flag,
            envvar=env_name(name),
            help=field.description,
            show_default=default_text(name) or "unset",
            metavar=None if is_switch else _metavar(field.annotation),
        )
        # Other values stay text: the settings check and convert them, wherever they come from.
        parameters.append(_parameter(name, bool | None if is_switch else str | None, None, option))
    return parameters


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _metavar(annotation: Any) -> str:
    """What to write behind a flag: the choices of a Literal, else a name for the type."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
    if all(isinstance(kind, str) for kind in kinds):
        return "|".join(kinds)
    return {int: "INTEGER", float: "SECONDS"}.get(kinds[0], "TEXT")


serve_command.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
