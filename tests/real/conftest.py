"""A real model for tests marked `real`; they are skipped, with the reason, where it cannot be fetched."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headbank.errors import ModelError
from headbank.models.catalogue import DEFAULT_MODEL
from headbank.models.pull import pull

START_S = 240
COMMAND = "from headbank.cli import main; main()"


@pytest.fixture(scope="session")
def real_model() -> str:
    """The catalogue name of a small real model that lies ready."""
    try:
        pull(DEFAULT_MODEL)
    except ModelError as error:
        pytest.skip(f"no real model: {error}")
    return DEFAULT_MODEL


@pytest.fixture(scope="session")
def real_server(real_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of `headrank serve` on the real model and its shipped bank."""
    log = tmp_path_factory.mktemp("serve") / "log"
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                COMMAND,
                "serve",
                "--model",
                real_model,
                "--port",
                "0",
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        yield _wait(process, log)
    finally:
        process.terminate()
        process.wait(60)


def _wait(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        text = log.read_text()
        assert process.poll() is None, text
        found = [word for word in text.split() if word.startswith("http://127.0.0.1:")]
        if found and httpx.get(f"{found[0]}/readyz").status_code == 200:
            return found[0]
        time.sleep(0.5)
    raise AssertionError(f"not ready after {START_S} s:\n{log.read_text()}")
