"""Peak memory of one call."""

import copy
import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from headbank.jobs import bench_memory
from headbank.jobs.bench import BenchConfig
from headbank.jobs.bench_memory import MemoryTask, apart, measure, measure_apart, peak_extra_bytes
from headbank.types import HeadId
from tests.support.tiny_models import tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Tiny-Llama"
    copy.deepcopy(tiny_model("llama")).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def task(saved: Path, contestant: str, documents: int = 4, **changes: Any) -> MemoryTask:
    return MemoryTask(
        str(saved),
        "float32",
        "cpu",
        None,
        (HeadId(0, 1), HeadId(1, 3)),
        **{"response_tokens": 3, "max_bytes": 1 << 30, **changes},
        config=BenchConfig((2, documents), document_tokens=10, query_tokens=5, rounds=1),
        contestant=contestant,
        documents=documents,
    )


def linux_tells() -> bool:
    return peak_extra_bytes(lambda: None, CPU) is not None


@pytest.mark.skipif(not linux_tells(), reason="the system does not tell a process's peak memory")
def test_the_peak_counts_what_was_freed_again_and_not_what_was_there() -> None:
    there = torch.ones(64 * MIB // 4)

    def call() -> None:
        torch.ones(48 * MIB // 4)
        torch.ones(96 * MIB // 4)

    peak = peak_extra_bytes(call, CPU)
    assert peak is not None and 90 * MIB < peak < 110 * MIB
    assert there.sum() == 64 * MIB // 4


@pytest.mark.skipif(
    not linux_tells() or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs Linux with glibc"
)
def test_memory_that_was_freed_before_hides_nothing() -> None:
    # Pieces too small to be mapped one by one; the last keeps the heap from shrinking.
    pieces = [torch.ones(15_000) for _ in range(1000)]
    last = pieces.pop()
    del pieces
    peak = peak_extra_bytes(lambda: [torch.ones(15_000) for _ in range(1000)], CPU)
    assert peak is not None and peak > 50 * MIB
    assert last.sum() == 15_000


def test_a_system_that_does_not_tell_gives_no_number(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    def refuse(self: Path, text: str) -> int:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    called: list[int] = []
    assert peak_extra_bytes(lambda: called.append(1), CPU) is None
    assert measure(task(saved, "floor"))["skipped"] == "this system does not tell a process's peak memory"


def test_keys_and_values_are_taken_off(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    def peak(call: Any, device: torch.device) -> int:
        assert call().scores.shape == (200,)
        return 10 * MIB

    monkeypatch.setattr(bench_memory, "peak_extra_bytes", peak)
    found = measure(task(saved, "heads_parallel_cold", 200))
    assert found["kv_bytes"] > 0
    assert found == {
        "documents": 200,
        "contestant": "heads_parallel_cold",
        "peak_extra_bytes": 10 * MIB,
        "kv_bytes": found["kv_bytes"],
        "without_kv_bytes": 10 * MIB - found["kv_bytes"],
    }
    # Documents that were there before the call are not the call's.
    assert measure(task(saved, "heads_parallel_warm", 200))["kv_bytes"] == 0


def test_who_cannot_do_a_case_says_why(saved: Path) -> None:
    assert measure(task(saved, "eager", 200))["skipped"].startswith("documents: 200 documents")
    assert measure(task(saved, "eager", max_bytes=10))["skipped"].startswith("attention matrices take")


def test_a_fresh_process_does_the_work() -> None:
    assert apart(os.system, f"test $PPID -ne {os.getpid()}") == 0


def test_the_death_of_that_process_is_told(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    monkeypatch.setattr(bench_memory, "measure", os._exit)
    monkeypatch.setattr(bench_memory, "apart", lambda function, value: apart(function, 1))
    assert measure_apart(task(saved, "floor")) == {
        "documents": 4,
        "contestant": "floor",
        "skipped": "the process was killed, most likely for lack of memory",
    }
