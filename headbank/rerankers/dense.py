"""Dense retrieval, the embedding baseline: cosine similarity of a sentence-transformers model."""

import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from headbank.errors import InputTooLong, ModelError
from headbank.models.catalogue import CATALOGUE, DEFAULT_EMBEDDING, resolve
from headbank.models.hub import require_on_hub
from headbank.rerankers.base import by_score
from headbank.types import Ranking, RankOptions

BGE_INSTRUCTION = "Represent this sentence for searching relevant passages: "
"""What the English BGE models expect before a query, and nothing before a passage (their model cards)."""

_BGE_ENGLISH = re.compile(r"bge-\w+-en(-v[\d.]+)?", re.IGNORECASE)


def default_instruction(model: str) -> str | None:
    """The query instruction that a model's name calls for; None where the name says nothing."""
    entry = CATALOGUE.get(model)
    last = (entry.hub_id if entry else model).rstrip("/").rsplit("/", 1)[-1]
    return BGE_INSTRUCTION if _BGE_ENGLISH.fullmatch(last) else None


class Dense:
    """Rank by the cosine similarity of embeddings of query and documents.

    `RankOptions.view`, `aggregation` and `explain` have no meaning here.
    """

    name = "dense"

    def __init__(
        self,
        model: str = DEFAULT_EMBEDDING,
        query_instruction: str | None = None,
        device: str | None = None,
        *,
        local_files_only: bool = False,
    ) -> None:
        """Load the model: a catalogue name, hub id or local folder.

        `query_instruction` goes before the query ("" for nothing); None takes what the model's name calls for
        (`default_instruction`), then what the model's own configuration has for queries. `device` None: the
        fastest there is. `local_files_only` never downloads. Raises ModelError when the model cannot be loaded.
        """
        self._model = _load(model, device, local_files_only)
        chosen = default_instruction(model) if query_instruction is None else query_instruction
        prompts = {"query": None, "document": None, "passage": None, "corpus": None, **self._model.prompts}
        self._query_prompt: str = (prompts["query"] or "") if chosen is None else chosen
        self._document_prompt: str = prompts["document"] or prompts["passage"] or prompts["corpus"] or ""

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        """Score every document: (1 + cosine) / 2, in [0, 1].

        Documents over the model's length, or over `options.max_tokens_per_doc`, are cut at the end and
        reported in `cut`. `input_tokens` counts what the model reads, special tokens included. Raises
        InputTooLong when the query alone is over the model's length.
        """
        started = time.perf_counter()
        if not documents:
            return Ranking((), (), self.name, seconds={"tokenise": 0.0, "forward": 0.0, "vote": 0.0})
        tokenizer = self._model.tokenizer
        specials: int = tokenizer.num_special_tokens_to_add()
        room: int = (self._model.max_seq_length or tokenizer.model_max_length) - specials
        asked, prompt, *offsets = self._offsets(
            [self._query_prompt + query, self._document_prompt, *documents]
        )
        if len(asked) > room:
            raise InputTooLong("query", f"has {len(asked)} tokens, the embedding model takes {room}", room)
        limit = room - len(prompt)
        if options.max_tokens_per_doc is not None:
            limit = min(limit, options.max_tokens_per_doc)
        n_read = [specials + len(prompt) + min(len(found), limit) for found in offsets]
        cut = tuple(i for i, found in enumerate(offsets) if len(found) > limit)
        texts = list(documents)
        for i in cut:
            texts[i] = texts[i][: offsets[i][limit][0]]
        tokenised = time.perf_counter()
        scores = self._similarities(query, texts)
        forwarded = time.perf_counter()
        order = by_score(scores)
        return Ranking(
            scores=scores,
            order=order,
            method=self.name,
            input_tokens=specials + len(asked) + sum(n_read),
            cut=cut,
            seconds={
                "tokenise": tokenised - started,
                "forward": forwarded - tokenised,
                "vote": time.perf_counter() - forwarded,
            },
        )

    def _offsets(self, texts: list[str]) -> list[list[tuple[int, int]]]:
        """Character range of every token of every text, special tokens left out."""
        encoded = self._model.tokenizer(
            texts,
            add_special_tokens=False,
            truncation=False,
            padding=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        offsets: list[list[tuple[int, int]]] = encoded["offset_mapping"]
        return offsets

    def _similarities(self, query: str, texts: list[str]) -> tuple[float, ...]:
        options: dict[str, Any] = {"normalize_embeddings": True, "show_progress_bar": False}
        # Equal documents are embedded once: in different batches their last digits could differ.
        unique = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        asked = self._model.encode_query([query], prompt=self._query_prompt, **options)
        found = self._model.encode_document(list(unique), prompt=self._document_prompt, **options)
        cosines = np.clip(np.asarray(found, np.float64) @ np.asarray(asked[0], np.float64), -1.0, 1.0)
        return tuple(float((1.0 + cosines[unique[text]]) / 2.0) for text in texts)


def _load(model: str, device: str | None, local_files_only: bool) -> Any:
    # Imported here: it takes seconds, and the other methods do without it.
    from sentence_transformers import SentenceTransformer

    source = resolve(model)
    options: dict[str, Any] = {
        "device": device,
        "trust_remote_code": False,
        "model_kwargs": {"use_safetensors": True},
    }
    # Missing folder, refused hub, foreign format: the library has a different error class for each.
    try:
        return SentenceTransformer(str(source), local_files_only=True, **options)
    except Exception as error:
        reason = error
    if isinstance(source, str) and not local_files_only:
        try:
            require_on_hub(source)
            return SentenceTransformer(source, **options)
        except Exception as error:
            reason = error
    text = (str(reason).strip().splitlines() or [""])[0][:300]
    raise ModelError(
        f"the embedding model cannot be loaded ({type(reason).__name__}: {text}); fetch one with "
        "`headrank pull all-minilm-l6-v2` and name it with `--dense-model all-minilm-l6-v2`, "
        "or give the path of a sentence-transformers folder"
    ) from reason
