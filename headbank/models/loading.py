"""From a name, a folder or a GGUF file to a runner. No code from a model's repository is ever executed."""

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from headbank.errors import InputError, ModelError
from headbank.models.base import HeadRunner
from headbank.models.catalogue import resolve
from headbank.models.fake import FAKE_MODEL, FakeRunner
from headbank.models.gguf import gguf_file, unpacked
from headbank.models.hf import HFRunner
from headbank.models.hub import require_on_hub
from headbank.models.tap import ATTENTION_NAME

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]


def default_device() -> str:
    """`cuda` where there is one, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> torch.dtype:
    """bfloat16 where the device multiplies it natively, else float32.

    On a processor without such instructions bfloat16 is several times slower than float32, not faster.
    """
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    found = torch.cpu.get_capabilities()
    return torch.bfloat16 if found.get("avx512_bf16") or found.get("amx_bf16") else torch.float32


def load_runner(
    model: str, *, dtype: str = "auto", device: str = "auto", threads: int | None = None
) -> HeadRunner:
    """Load an engine.

    `model` is `fake`, a catalogue name, a hub id, a folder, or a GGUF file. `threads` bounds torch's threads.
    Raises InputError for an unknown dtype or device, ModelError when the model cannot be found or loaded,
    UnsupportedModel when its attention cannot be tapped.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if model == FAKE_MODEL:
        return FakeRunner()
    where = default_device() if device == "auto" else device
    if dtype not in get_args(DType):
        raise InputError("dtype", f"must be one of {', '.join(get_args(DType))}")
    kind = default_dtype(where) if dtype == "auto" else getattr(torch, dtype)
    _check_device(where)
    source = resolve(model)
    network, tokenizer = _load(source, kind)
    name = _file_name(Path(model).expanduser()) if _is_path(model) else model
    return HFRunner(
        network.to(where),
        tokenizer,
        model_id=name,
        revision=getattr(network.config, "_commit_hash", None) or "",
    )


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


def _load(source: Path | str, dtype: torch.dtype) -> tuple[Any, Any]:
    disable_progress_bar()
    if isinstance(source, str):
        require_on_hub(source)
    try:
        file = gguf_file(source) if isinstance(source, Path) else None
        place = str(source if file is None else unpacked(file))
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        network, found = AutoModelForCausalLM.from_pretrained(
            place,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    # A foreign format, a shape that does not fit, a missing tokenizer library: each has an error class of its own.
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"{source} cannot be loaded as a causal language model ({type(error).__name__}: {error}); give a "
            "catalogue name fetched by `headrank pull`, a hub id, a folder with safetensors, or a GGUF file"
        ) from error
    if found["missing_keys"]:
        # transformers fills them with random numbers and goes on.
        raise ModelError(f"{source} lacks weights: {', '.join(sorted(found['missing_keys'])[:3])}")
    return network, tokenizer
