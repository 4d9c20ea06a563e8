"""How much memory one call of a contestant takes on top of what was there, in a process of its own."""

import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from headbank.errors import InputTooLong
from headbank.jobs.bench import BenchConfig, make_texts
from headbank.jobs.bench_contestants import CONTESTANTS, Case, Skip, open_stage
from headbank.models.loading import load_runner
from headbank.types import HeadId

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class MemoryTask:
    """One call to measure; the fields of the model are those of `load_runner`."""

    model: str
    dtype: str
    device: str
    threads: int | None
    heads: tuple[HeadId, ...]
    response_tokens: int
    max_bytes: int
    config: BenchConfig
    """Makes the texts."""
    contestant: str
    documents: int


def measure_apart(task: MemoryTask) -> dict[str, Any]:
    """`measure` in a fresh process, so that nothing freed earlier hides what a call needs."""
    try:
        return apart(measure, task)
    except BrokenProcessPool:
        return _described(task) | {"skipped": "the process was killed, most likely for lack of memory"}


def apart(function: Callable[[_In], _Out], value: _In) -> _Out:
    """Call a function in a fresh process. Raises BrokenProcessPool when that dies."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, value).result()


def measure(task: MemoryTask) -> dict[str, Any]:
    """Peak of one call in bytes.

    `peak_extra_bytes` is what the call added to the memory in use, `kv_bytes` the keys and values it kept, and
    `without_kv_bytes` the difference. A call on one document comes first, for what libraries set up once. The three
    are replaced by `skipped`, a reason, where the contestant cannot do the case or the system does not tell.
    """
    runner = load_runner(task.model, dtype=task.dtype, device=task.device, threads=task.threads)
    stage = open_stage(runner, task.heads, response_tokens=task.response_tokens, max_bytes=task.max_bytes)
    documents, queries = make_texts(runner.prompts, task.config)
    contestant = CONTESTANTS[task.contestant]
    stage.plain.touch_weights()
    try:
        small = contestant.prepare(Case(stage, queries[0], tuple(documents[:1])))
        with stage.plain.attention(contestant.attention):
            small.run()
        prepared = contestant.prepare(Case(stage, queries[1], tuple(documents[: task.documents])))
        with stage.plain.attention(contestant.attention):
            peak = peak_extra_bytes(prepared.run, stage.plain.device)
    except (Skip, InputTooLong) as error:
        return _described(task) | {"skipped": str(error)}
    except torch.OutOfMemoryError:
        return _described(task) | {"skipped": "the device's memory is too small"}
    if peak is None:
        return _described(task) | {"skipped": "this system does not tell a process's peak memory"}
    return _described(task) | {
        "peak_extra_bytes": peak,
        "kv_bytes": prepared.kv_bytes,
        "without_kv_bytes": peak - prepared.kv_bytes,
    }


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most memory in use during a call, less that in use before; None where the system does not tell.

    On CUDA the tensors on the device; else the resident size of this process, whose high-water mark Linux resets.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return int(torch.cuda.max_memory_allocated(device)) - int(before)
    mark = Path("/proc/self/clear_refs")
    if not mark.exists():
        return None
    _give_back()
    try:
        mark.write_text("5")
    except OSError:
        return None
    resident = _status_bytes("VmRSS")
    call()
    return _status_bytes("VmHWM") - resident


def _give_back() -> None:
    """Return freed memory to the system, where the C library can: a call that reuses it would seem to take none."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    value = next(line for line in lines if line.startswith(f"{field}:"))
    return int(value.split()[1]) * 1024


def _described(task: MemoryTask) -> dict[str, Any]:
    return {"documents": task.documents, "contestant": task.contestant}
