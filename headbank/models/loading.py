"""From a name, a folder or a GGUF file to a runner. No code from a model's repository is ever executed."""

import contextlib
import copy
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.utils.logging import disable_progress_bar

from headbank.errors import InputError, ModelError
from headbank.models import arch
from headbank.models.base import HeadRunner
from headbank.models.cache import DocumentCache
from headbank.models.catalogue import resolve
from headbank.models.fake import FAKE_MODEL, FakeRunner
from headbank.models.gguf import gguf_file, unpacked
from headbank.models.hf import HFRunner
from headbank.models.hub import require_on_hub
from headbank.models.tap import ATTENTION_NAME

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]

_PROBE_ROWS, _PROBE_WIDTH, _PROBE_REPEATS, _PROBE_GAIN = 256, 256, 3, 1.2

_CGROUP = Path("/sys/fs/cgroup")


def default_device() -> str:
    """`cuda` where there is one, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def probe_dtype(
    d_model: int, d_ff: int, device: str, timer: Callable[[], float] = time.perf_counter
) -> torch.dtype:
    """The faster of bfloat16 and float32 on a device, for a model with these widths.

    A GPU gets bfloat16 where it has it. A processor gets it where one linear layer [d_model -> d_ff] on 256 rows is
    at least 1.2 times faster that way: without instructions for it bfloat16 is several times slower than float32, and
    what the processor claims to have does not tell what the installed torch makes of it. The test takes some tens of
    milliseconds. `timer` returns seconds and is read before and after each of six runs, float32 and bfloat16 in turn.
    """
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if not device.startswith("cpu"):
        return torch.float32
    # Beyond a few hundred, the widths change how long it takes and no longer which of the two is faster.
    wide, deep = min(d_ff, _PROBE_WIDTH), min(d_model, _PROBE_WIDTH)
    pairs = {
        dtype: (torch.ones(_PROBE_ROWS, deep, dtype=dtype), torch.ones(wide, deep, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    best = dict.fromkeys(pairs, math.inf)
    with torch.inference_mode():
        for _ in range(_PROBE_REPEATS):
            for dtype, (rows, weight) in pairs.items():
                begin = timer()
                torch.nn.functional.linear(rows, weight)
                best[dtype] = min(best[dtype], timer() - begin)
    faster = best[torch.float32] >= _PROBE_GAIN * best[torch.bfloat16]
    return torch.bfloat16 if faster else torch.float32


def usable_cpus() -> int:
    """How many processors this process may use: its affinity, and the quota of its control group where readable."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return _within(found, int(quota), int(period))
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((_CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return _within(found, int(quota), int(period))
    return found


def load_runner(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    max_layers: int | None = None,
    cache_bytes: int = 0,
    host_cache_bytes: int = 0,
) -> HeadRunner:
    """Load an engine.

    `model` is `fake` (no other option but `threads` then counts), a catalogue name, a hub id, a folder, or a GGUF
    file. `threads` is the number of torch's threads; None keeps torch's own choice, bounded by the processors this
    process may use. With `max_layers` only that many layers are read from disk, counted from the first: their heads
    vote as those of the whole model do, but nothing can be written, so there is no response view. `cache_bytes` and
    `host_cache_bytes` bound the keys and values of documents kept on the device and, when they fall out of there, in
    the host's memory; 0 keeps none. Raises InputError for an option out of its range, ModelError when the model
    cannot be found or loaded, UnsupportedModel when its attention cannot be tapped.
    """
    _set_threads(threads)
    if model == FAKE_MODEL:
        return FakeRunner()
    where = default_device() if device == "auto" else device
    if dtype not in get_args(DType):
        raise InputError("dtype", f"must be one of {', '.join(get_args(DType))}")
    for name, value in (("cache_bytes", cache_bytes), ("host_cache_bytes", host_cache_bytes)):
        if value < 0:
            raise InputError(name, "must not be negative", 0)
    _check_device(where)
    config, network, tokenizer = _load(resolve(model), dtype, where, max_layers)
    name = _file_name(Path(model).expanduser()) if _is_path(model) else model
    return HFRunner(
        network.to(where),
        tokenizer,
        model_id=name,
        revision=getattr(config, "_commit_hash", None) or "",
        config=config,
        documents=DocumentCache(cache_bytes, host_cache_bytes) if cache_bytes else None,
    )


def _within(processors: int, quota: int, period: int) -> int:
    """A quota is time per period; version 1 of control groups writes -1 where there is none."""
    return min(processors, max(1, quota // period)) if quota > 0 else processors


def _set_threads(threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise InputError("threads", "must be at least 1", 1)
    wanted = min(torch.get_num_threads(), usable_cpus()) if threads is None else threads
    if wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)


def _check_device(device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError("device", "is not available here; auto takes what is") from error


def _is_path(model: str) -> bool:
    return Path(model).expanduser().exists()


def _file_name(path: Path) -> str:
    """Name of a folder, or of a file without its ending; folders may have dots in their names (`Qwen2.5-7B`)."""
    return path.resolve().name if path.is_dir() else path.stem


def _load(source: Path | str, dtype: str, device: str, max_layers: int | None) -> tuple[Any, Any, Any]:
    """Configuration of the whole model, the model (its first `max_layers` layers), and its tokenizer."""
    disable_progress_bar()
    if isinstance(source, str):
        require_on_hub(source)
    try:
        file = gguf_file(source) if isinstance(source, Path) else None
        place = str(source if file is None else unpacked(file))
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        kind = _auto_dtype(config, device) if dtype == "auto" else getattr(torch, dtype)
        network, found = _read_weights(place, config, kind, max_layers)
    # A foreign format, a shape that does not fit, a missing tokenizer library: each has an error class of its own.
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"{source} cannot be loaded as a causal language model ({type(error).__name__}: {error}); give a "
            "catalogue name fetched by `headrank pull`, a hub id, a folder with safetensors, or a GGUF file"
        ) from error
    if found["missing_keys"]:
        # transformers fills them with random numbers and goes on.
        raise ModelError(f"{source} lacks weights: {', '.join(sorted(found['missing_keys'])[:3])}")
    return config, network, tokenizer


def _auto_dtype(config: Any, device: str) -> torch.dtype:
    text = config.get_text_config()
    d_model = getattr(text, "hidden_size", _PROBE_WIDTH)
    d_ff = getattr(text, "intermediate_size", None)
    return probe_dtype(d_model, d_ff if isinstance(d_ff, int) else 4 * d_model, device)


def _read_weights(place: str, config: Any, dtype: torch.dtype, max_layers: int | None) -> tuple[Any, Any]:
    """The model and what transformers says about its loading."""
    options = {
        "dtype": dtype,
        "attn_implementation": ATTENTION_NAME,
        "use_safetensors": True,
        "trust_remote_code": False,
        "output_loading_info": True,
    }
    total = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if max_layers is not None and not 1 <= max_layers <= total:
        raise InputError("max_layers", f"must be from 1 to {total}, the layers of this model", total)
    if max_layers is None or max_layers == total:
        loaded: tuple[Any, Any] = AutoModelForCausalLM.from_pretrained(place, config=config, **options)
        return loaded
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{config.model_type} is no causal language model")
    part = copy.deepcopy(config)
    for name, value in arch.first_layers(part.get_text_config(), max_layers).items():
        setattr(part.get_text_config(), name, value)
    with _unread(MODEL_MAPPING[type(config)], range(max_layers, total)):
        # Without the output layer, which only writing needs. Tensors that the model has no place for stay on disk.
        loaded = AutoModel.from_pretrained(place, config=part, **options)
    return loaded


@contextlib.contextmanager
def _unread(kind: Any, layers: range) -> Iterator[None]:
    """Keep transformers from warning that a file has these layers and an output layer; it warns of anything else."""
    known = kind._keys_to_ignore_on_load_unexpected
    pattern = rf"(^|\.)layers\.({'|'.join(map(str, layers))})\.|^lm_head\."
    kind._keys_to_ignore_on_load_unexpected = [*(known or ()), pattern]
    try:
        yield
    finally:
        kind._keys_to_ignore_on_load_unexpected = known
