"""Engines without a model, for the tests of what surrounds one; importable in the child process."""

import os
import signal
import time
from pathlib import Path

from headbank.errors import BankMismatch, InputTooLong, NonFiniteScore
from headbank.types import HeadId, HeadSet, ModelInfo, Ranking
from service.engine import EngineInfo, Job
from service.settings import Settings

INFO = EngineInfo(
    model=ModelInfo(
        model_id="scripted",
        revision="r1",
        config_hash="c",
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        d_model=1,
        d_head=1,
        context_tokens=100,
        windows=(None,),
        tokenizer_hash="t",
        template_hash="p",
        norm_hashes=("n",),
        dtype="float32",
    ),
    layout="joint",
    device="cpu",
    head_sets=(HeadSet("expert.query", "query", (HeadId(0, 0),), "borda", 1),),
)


class AcceleratorError(RuntimeError):
    """Named as torch names what a failed GPU raises; torch itself is not loaded here."""


class ScriptedEngine:
    """Does what the first word of the query says; longer documents rank first."""

    info = INFO

    def __init__(self, log: Path | None = None):
        self._log = log

    def rank(self, job: Job) -> Ranking:
        verb, _, argument = job.query.partition(" ")
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(job.query + "\n")
        if verb == "sleep":
            time.sleep(float(argument.split()[0]))
        elif verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif verb == "device":
            raise AcceleratorError("illegal memory access")
        elif verb == "bug":
            raise ValueError(f"about {job.query}")
        elif verb == "nan":
            raise NonFiniteScore("a document's score is not a finite number")
        elif verb == "long":
            raise InputTooLong("documents", "too long", 7)
        elif verb == "nonsense":
            return "not a ranking"
        lengths = [float(len(document)) for document in job.documents]
        order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        scores = tuple(length / (1 + length) for length in lengths)
        return Ranking(scores, tuple(order), job.method, input_tokens=11, seconds={"forward": 0.002})


def load_scripted(settings: Settings) -> ScriptedEngine:
    """`settings.bank` names a file that gets a line per ranking."""
    return ScriptedEngine(settings.bank)


def load_once(settings: Settings) -> ScriptedEngine:
    """Loads the first time; later the process dies while loading until the file `settings.bank` is gone."""
    if settings.bank.exists():
        os._exit(9)
    settings.bank.touch()
    return ScriptedEngine()


def load_mismatch(settings: Settings) -> ScriptedEngine:
    raise BankMismatch("template_hash", "old", "new", "recalibrate with: headrank calibrate")


def load_bug(settings: Settings) -> ScriptedEngine:
    raise KeyError("config")


def load_dies(settings: Settings) -> ScriptedEngine:
    os._exit(3)


def load_never(settings: Settings) -> ScriptedEngine:
    time.sleep(600)
    raise AssertionError
