"""Settings, their flags, and `headrank serve`."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from headbank import bank as banks
from headbank.cli.serve import serve_command
from headbank.errors import BankError
from headbank.models.fake import FAKE_HEAD_SETS, FakeRunner
from service.loading import load_engine
from service.settings import Settings, env_name, flag_name, settings_table
from tests.support.banks import bank_of_sets

ROOT = Path(__file__).parents[2]


@pytest.fixture
def served(monkeypatch):
    """Runs `headrank serve` up to the server; gives the settings it would run with, and the result."""
    seen = []
    monkeypatch.setattr("service.server.serve", seen.append)
    app = typer.Typer()
    app.command()(serve_command)

    def run(*flags, **environment):
        result = CliRunner().invoke(app, list(flags), env=environment | {"COLUMNS": "200", "TERM": "dumb"})
        return (seen.pop() if seen else None), result

    return run


def test_every_setting_is_described_and_has_a_flag_and_a_variable(served):
    _, result = served("--help")
    assert result.exit_code == 0
    text = " ".join(result.output.replace("│", " ").split())
    table = settings_table()
    for name, field in Settings.model_fields.items():
        assert len(field.description) > 30
        assert f" {flag_name(name)} " in text
        assert env_name(name) in text
        assert f"| `{flag_name(name)}` | `{env_name(name)}` |" in table
        assert field.description in table
    assert "[default: (1000)]" in text
    assert "heads|icr|fusion|llm|bm25|dense" in text
    assert "both|query" in text
    assert "--no-warm-up" in text


def test_defaults(served):
    settings, result = served()
    assert result.exit_code == 0
    assert settings == Settings()


def test_flags_go_before_variables(served):
    settings, _ = served(
        "--port", "9", "--no-warm-up", "--api-keys", "a, b,", "--bank", "x/y", "--request-timeout-s", "1.5",
        HEADRANK_PORT="8", HEADRANK_WARM_UP="true", HEADRANK_API_KEYS="c", HEADRANK_THREADS="3",
        HEADRANK_STRICT_MODEL_NAME="1",
    )  # fmt: skip
    assert settings.port == 9
    assert settings.warm_up is False
    assert [key.get_secret_value() for key in settings.api_keys] == ["a", "b"]
    assert settings.bank == Path("x/y")
    assert settings.request_timeout_s == 1.5
    assert settings.threads == 3
    assert settings.strict_model_name is True


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "70000"),
        ("--port", "many"),
        ("--dtype", "int8"),
        ("--default-method", "magic"),
        ("--queue-requests", "0"),
        ("--request-timeout-s", "0"),
        ("--model", ""),
        ("--log-level", "loud"),
        ("--response-tokens", "1000"),
        ("--batch-tokens", "0"),
        ("--document-cache-bytes", "-1"),
        ("--host-cache-bytes", "much"),
        ("--views", "response"),
    ],
)
def test_wrong_values_name_flag_and_variable(served, flag, value):
    name = flag.removeprefix("--").replace("-", "_")
    for settings, result in (served(flag, value), served(**{env_name(name): value})):
        assert settings is None
        assert result.exit_code == 2
        text = " ".join(result.output.replace("│", " ").split())
        assert f"{flag} ({env_name(name)}): " in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--default-view", "response"), "query does not serve the default_view response"),
        (("--default-method", "llm"), "query does not serve the default_method llm"),
        (("--default-method", "icr"), "query does not serve the default_method icr"),
    ],
)
def test_query_view_alone_does_not_go_with_defaults_that_need_the_whole_model(served, flags, message):
    assert served(*flags)[0] is not None
    settings, result = served("--views", "query", *flags)
    assert settings is None
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert f"--views (HEADRANK_VIEWS): Value error, {message}" in text


def test_keys_are_secret():
    settings = Settings(api_keys="topsecret")
    assert "topsecret" not in repr(settings) + str(settings.model_dump()) + settings.model_dump_json()


def test_settings_cannot_change():
    with pytest.raises(ValidationError):
        Settings().port = 1


def run_serve(*flags):
    """`headrank serve` as a process of its own."""
    code = "from headbank.cli import main; main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "300"}
    return subprocess.run(
        [sys.executable, "-c", code, "serve", "--model", "fake", "--port", "0", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_bank_of_another_model_stops_the_service_with_its_message(tmp_path):
    info = replace(FakeRunner().info, template_hash="older")
    banks.write(bank_of_sets(info, FAKE_HEAD_SETS), tmp_path)
    result = run_serve("--bank", str(tmp_path))
    assert result.returncode == 1
    assert (
        "template_hash is 'fake', the bank has 'older'; recalibrate with: headrank calibrate" in result.stderr
    )
    assert "Traceback" not in result.stderr


def test_the_process_that_listens_loads_no_model_library():
    code = "import sys, service.server; print({'torch', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "set()"


def test_missing_bank_is_said_so(tmp_path):
    with pytest.raises(BankError, match="no head bank for this model; make one with: headrank calibrate"):
        load_engine(Settings(model="fake", bank=tmp_path))


def test_bank_without_heads_for_the_default_view_is_refused(tmp_path):
    banks.write(bank_of_sets(FakeRunner().info, FAKE_HEAD_SETS[:1]), tmp_path)
    info = load_engine(Settings(model="fake", bank=tmp_path)).info
    assert [s.name for s in info.head_sets] == ["expert.query.joint"]
    assert info.defaults == {"query": "expert.query.joint"}
    with pytest.raises(BankError, match="no default heads for the default_view response; it has: query"):
        load_engine(Settings(model="fake", bank=tmp_path, default_view="response"))
