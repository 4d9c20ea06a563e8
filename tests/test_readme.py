"""What the README promises is what there is."""

import re
from pathlib import Path

import click
import typer

from headbank.cli import app
from headbank.models.arch import TESTED_FAMILIES
from service.app import create_app
from service.settings import Settings, settings_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CODE = "\n".join(re.findall(r"```(?:bash|console)\n(.*?)```", README, re.DOTALL))


def test_the_two_commands_are_those_of_ci() -> None:
    assert 'pip install -e ".[cpu]" && headrank demo' in CODE
    assert 'pip install -e ".[cpu,test]" && pytest' in CODE
    script = (ROOT / ".ci/run").read_text()
    assert 'pip install -q -e ".[cpu,test]"\n' in script
    assert {"headrank demo", "pytest", "mypy", "ruff check ."} <= set(script.splitlines())


def test_every_command_and_flag_in_the_readme_exists() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    lines = re.findall(r"(?:^|&& |\| |; )headrank (.+)$", CODE.replace("\\\n", " "), re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        words = re.split(r"\s[|>&]", line)[0].split()
        command = group.commands[words[0]]  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            command = command.commands[words[1]]
        flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {
            "--help"
        }
        used = {word.split("=")[0] for word in words if word.startswith("-") and word != "-"}
        assert used <= flags, f"{line}: {used - flags}"


def test_every_command_is_in_the_readme() -> None:
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"headrank {name}" in README


def test_the_table_of_settings_is_the_settings() -> None:
    assert settings_table() in README


def test_every_path_of_the_api_is_in_the_readme() -> None:
    for path in create_app(Settings(model="fake")).openapi()["paths"]:
        assert f"`{path}`" in README


def _mapped() -> set[str]:
    """Paths of the map of the tree: a line's folder is the last one above it that is indented less."""
    block = README[README.index("## Map of the tree") :].split("```")[1]
    paths: set[str] = set()
    folders: list[tuple[int, str]] = []
    for line in block.splitlines()[1:]:
        indent = len(line) - len(line.lstrip())
        name = line.split()[0]
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        parent = folders[-1][1] if folders else ""
        if name.endswith("/"):
            folders.append((indent, parent + name))
        else:
            paths.add(parent + name)
    return paths


def test_the_map_names_every_module_and_no_other() -> None:
    modules = [*ROOT.glob("headbank/**/*.py"), *ROOT.glob("service/**/*.py")]
    assert _mapped() == {str(p.relative_to(ROOT)) for p in modules if p.name != "__init__.py"}


def test_tested_families_are_listed() -> None:
    for family in TESTED_FAMILIES:
        assert f"`{family}`" in README
