"""GGUF files, unpacked once: parsing one takes most of a minute, loading the unpacked copy takes seconds."""

import hashlib
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils.logging import disable_progress_bar

from headbank.errors import ModelError
from headbank.models.catalogue import models_dir

_SAMPLE_BYTES = 1 << 20


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is or holds; None for a folder in Hugging Face's format.

    Raises ModelError for a folder with more than one.
    """
    if path.is_file():
        return path
    if (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(f"{path} holds {len(files)} GGUF files; name the one to load")
    return files[0] if files else None


def unpacked(file: Path) -> Path:
    """Folder with the file's weights dequantised to bfloat16 and its tokenizer, made on first use.

    It lies under `models_dir()/unpacked`, named by the content of the file. bfloat16 keeps 8 bits of every
    weight, more than the quantised formats hold. Raises OSError or ValueError when transformers cannot read the file.
    """
    folder = models_dir() / "unpacked" / f"{file.stem.lower()}-{_fingerprint(file)}"
    if folder.is_dir():
        return folder
    disable_progress_bar()
    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    options = {"gguf_file": file.name, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **options)
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            **options,
        )
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        if not folder.is_dir():
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _fingerprint(file: Path) -> str:
    """Hash of the size and both ends of a file: reading all of a large one would take longer than loading it."""
    digest = hashlib.sha256(str(file.stat().st_size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, file.stat().st_size - _SAMPLE_BYTES))
        digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]
