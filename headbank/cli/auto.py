"""A bank for a model that has none: what `headrank serve --auto-calibrate` does before it serves."""

import multiprocessing
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headbank.cli.calibrate import open_voters, read_data, run_calibration
from headbank.data.synthetic import SYNTHETIC
from headbank.errors import BankError, EngineError
from headbank.types import VIEWS, PromptStyle, View

if TYPE_CHECKING:
    from headbank.types import ModelInfo

DEFAULT_SAMPLES = 60


def user_banks() -> Path:
    """Folder of the banks that were made on this machine without being asked where."""
    return Path.home() / ".cache" / "headrank" / "banks"


def calibrate_hint(model: str, bank: Path | None) -> str:
    """What to type where a model has no bank."""
    root = bank or user_banks()
    return (
        f"without labelled questions: headrank calibrate --model {model} --bank {root} --data {SYNTHETIC}, then "
        f"headrank serve --model {model} --bank {root}; or both at once: headrank serve --model {model} "
        "--auto-calibrate"
    )


def ensure_bank(
    model: str, bank: Path | None, view: View, samples: int, dtype: str, device: str, threads: int | None
) -> Path | None:
    """Where the model's bank is: as given, inside the package (None), or newly made on synthetic questions.

    Runs in a process of its own, which gives back all the memory of the model, the device's too. Raises what loading
    and calibrating raise, EngineError when that process dies.
    """
    # spawn, as the engine of the service: a fork would inherit threads and the state of the device.
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    try:
        with _exit_on_sigterm():
            return pool.submit(_find_or_make, model, bank, view, samples, dtype, device, threads).result()
    except BrokenProcessPool as error:
        raise EngineError("the calibration ended before its time; is there enough memory?") from error
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown()


def _find_or_make(
    model: str, bank: Path | None, view: View, samples: int, dtype: str, device: str, threads: int | None
) -> Path | None:
    from headbank.jobs.calibrate import CalibrateConfig
    from headbank.models.loading import load_runner

    # The first layer tells models apart, and takes seconds where the whole model may take minutes.
    info = load_runner(model, dtype="bfloat16", device="cpu", threads=threads, max_layers=1).info
    roots = [None, user_banks()] if bank is None else [bank]
    for root in roots:
        if _has_bank(root, info):
            return root
    root = roots[-1]
    assert root is not None
    views = VIEWS if view == "response" else ("query",)
    config = CalibrateConfig(styles=(PromptStyle("parallel"),), views=views, curves=False)
    message = f"{model} has no head bank: calibrating on {samples} synthetic questions into {root}"
    typer.echo(message, err=True)
    runner = load_runner(model, dtype=dtype, device=device, threads=threads)
    # BM25 costs nothing, and lets `fusion` be served as well.
    voters = open_voters(["bm25"], "", device)
    run_calibration(runner, read_data([SYNTHETIC], samples, seed=0), root, config, voters=voters)
    return root


def _has_bank(root: Path | None, info: "ModelInfo") -> bool:
    from headbank.bank import check
    from headbank.rerankers.heads import open_bank

    try:
        check(open_bank(root, info), info)
    except BankError:
        return False
    return True


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the program by way of `finally`, as SIGINT does."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
