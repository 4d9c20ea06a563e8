"""Engines without a model, for the tests of what surrounds one; importable in the child process."""

import os
import signal
import time
from pathlib import Path

from headbank.errors import BankMismatch, HeadRankError, InputTooLong, NonFiniteScore
from headbank.types import HeadId, HeadSet, ModelInfo, Ranking
from service.engine import CacheCounts, EngineInfo, Job
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
    device="cpu",
    head_sets=(HeadSet("expert.query.joint", "expert", "query", (HeadId(0, 0),), "borda"),),
    defaults={"query": "expert.query.joint"},
    methods=("heads", "icr", "fusion", "llm", "bm25", "dense"),
)


class AcceleratorError(RuntimeError):
    """Named as torch names what a failed GPU raises; torch itself is not loaded here."""


class ScriptedEngine:
    """Does what the first word of each query says; longer documents rank first."""

    info = INFO

    def __init__(self, log: Path | None = None):
        self._log = log
        self._answered = 0

    @property
    def cache(self):
        """A hit for every ranking, and one document."""
        return CacheCounts(hits=self._answered, misses=1, device_bytes=7, host_bytes=5, documents=1)

    def rank_many(self, jobs):
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(" | ".join(job.query for job in jobs) + "\n")
        return [self._result(job) for job in jobs]

    def _result(self, job):
        try:
            return self._rank(job)
        except HeadRankError as error:
            return error

    def _rank(self, job: Job) -> Ranking:
        verb, _, argument = job.query.partition(" ")
        self._answered += 1
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
