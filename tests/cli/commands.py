"""How tests run a command, and questions that the fake engine can tell apart."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from headbank.cli import app

ANIMALS = ("falcon", "otter", "badger", "heron", "lynx", "marten")


def run(*arguments: str, stdin: str | None = None) -> str:
    """Standard output of a command that succeeds."""
    result = CliRunner().invoke(
        app, list(arguments), input=stdin, catch_exceptions=False, env={"COLUMNS": "250"}
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def question(i: int) -> dict[str, Any]:
    """One gold among four documents, neither the first nor the longest; only it has the animal that is asked for."""
    animal = ANIMALS[i % len(ANIMALS)]
    return {
        "id": f"q{i}",
        "question": f"Where does {animal} {i} sleep?",
        "answer": "cave",
        "documents": [
            {"text": "Rivers carry cold water from the hills down to the sea.", "gold": False},
            {"text": f"The {animal} rests in cave number {i}.", "gold": True},
            {"text": "Bread is baked early.", "gold": False},
            {"text": "Violins have four strings.", "gold": False},
        ],
    }


def write_questions(path: Path, numbers: range) -> Path:
    """A file of such questions."""
    path.write_text("\n".join(json.dumps(question(i)) for i in numbers))
    return path
