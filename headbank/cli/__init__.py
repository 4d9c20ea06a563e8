"""The `headrank` command. Modules here import the model engine and the jobs only inside the commands."""

import sys

import typer
from rich.console import Console

from headbank.cli.bank import bank_app
from headbank.cli.bench import bench_command
from headbank.cli.calibrate import calibrate_command
from headbank.cli.demo import demo_command
from headbank.cli.evaluate import evaluate_command
from headbank.cli.pull import pull_command
from headbank.cli.rerank import rerank_command
from headbank.cli.serve import serve_command
from headbank.errors import HeadRankError

app = typer.Typer(
    name="headrank",
    help="Rerank documents by the attention heads of an open language model, with no training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo_command)
app.command("pull")(pull_command)
app.command("rerank")(rerank_command)
app.command("serve")(serve_command)
app.command("calibrate")(calibrate_command)
app.command("evaluate")(evaluate_command)
app.command("bench")(bench_command)
app.add_typer(bank_app, name="bank")


def main() -> None:
    """Run the command; an error raised on purpose becomes one line and exit code 1."""
    try:
        app()
    except HeadRankError as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        sys.exit(1)
