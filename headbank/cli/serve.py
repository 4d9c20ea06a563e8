"""`headrank serve`: every setting of the service is a flag; the flags are made from the settings."""

import inspect
from types import NoneType
from typing import Annotated, Any, get_args

import typer
from pydantic import ValidationError

from service.settings import Settings, default_text, env_name, flag_name


def serve_command(**flags: Any) -> None:
    """Start the HTTP service. Flags go before environment variables; /docs describes the API."""
    settings = _settings({name: value for name, value in flags.items() if value is not None})
    # Imported here, so that the other commands do without it.
    from service.server import serve

    serve(settings)


def _settings(given: dict[str, Any]) -> Settings:
    """Settings from flags and the environment. Raises BadParameter that names the flag and the variable."""
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        raise typer.BadParameter(f"{flag_name(name)} ({env_name(name)}): {first['msg']}") from None


def _parameters() -> list[inspect.Parameter]:
    parameters = []
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
        annotation = Annotated[bool | None if is_switch else str | None, option]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    return parameters


def _metavar(annotation: Any) -> str:
    """What to write behind a flag: the choices of a Literal, else a name for the type."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
    if all(isinstance(kind, str) for kind in kinds):
        return "|".join(kinds)
    return {int: "INTEGER", float: "SECONDS"}.get(kinds[0], "TEXT")


serve_command.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
