"""Published file formats, what happens to ids and labels, and what is said about a bad file."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from headbank.data.readers import data_hash, read_samples
from headbank.errors import DataError
from headbank.types import Document, Sample

SHARED = Path(__file__).parents[3] / "shared" / "data"

HOTPOT: dict[str, Any] = {
    "_id": "h1",
    "question": "Where was the captain of the Auk born?",
    "answer": "Ostley",
    "context": [
        ["Auk", ["The Auk is a ship.", " Mira Tolv was her captain."]],
        ["Gannet", ["The Gannet is a ship."]],
        ["Mira Tolv", ["Mira Tolv was born in Ostley.", " She died in 1901."]],
    ],
    "supporting_facts": [["Auk", 1], ["Mira Tolv", 0]],
    "type": "bridge",
    "level": "hard",
}
HOTPOT_SAMPLE = Sample(
    id="h1",
    question="Where was the captain of the Auk born?",
    documents=(
        Document("The Auk is a ship. Mira Tolv was her captain.", "Auk", "h1-0", gold=True, relevance=1),
        Document("The Gannet is a ship.", "Gannet", "h1-1"),
        Document("Mira Tolv was born in Ostley. She died in 1901.", "Mira Tolv", "h1-2", True, 1),
    ),
    answer="Ostley",
    dataset="hotpotqa",
)


def written(folder: Path, *lines: object, name: str = "data") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def test_hotpotqa_as_published(tmp_path: Path) -> None:
    assert read_samples(written(tmp_path, [HOTPOT])) == [HOTPOT_SAMPLE]


def test_hotpotqa_as_exported_from_the_hub(tmp_path: Path) -> None:
    exported = {
        **{key: value for key, value in HOTPOT.items() if key != "_id"},
        "id": "h1",
        "context": {
            "title": [title for title, _ in HOTPOT["context"]],
            "sentences": [sentences for _, sentences in HOTPOT["context"]],
        },
        "supporting_facts": {"title": ["Auk", "Mira Tolv"], "sent_id": [1, 0]},
    }
    assert read_samples(written(tmp_path, exported)) == [HOTPOT_SAMPLE]


def test_2wiki_sentences_come_without_spaces_between_them(tmp_path: Path) -> None:
    item = {
        **HOTPOT,
        "context": [["Auk", ["The Auk is a ship.", "It sank.", ""]], ["Mira Tolv", ["She was born."]]],
        "evidences": [["Auk", "captain", "Mira Tolv"]],
    }
    (sample,) = read_samples(written(tmp_path, [item]))
    assert [d.text for d in sample.documents] == ["The Auk is a ship. It sank.", "She was born."]
    assert sample.dataset == "2wikimultihopqa"
    assert sample.golds == (0, 1)


def test_musique_as_published(tmp_path: Path) -> None:
    item = {
        "id": "2hop__1_2",
        "question": "Who owns the inn where the Orrin rises?",
        "answer": "Petra Lund",
        "answer_aliases": [],
        "answerable": True,
        "paragraphs": [
            {"idx": 0, "title": "Inn", "paragraph_text": "Petra Lund owns it.", "is_supporting": True},
            {"idx": 1, "title": "Orrin", "paragraph_text": "It is a river.", "is_supporting": False},
        ],
    }
    assert read_samples(written(tmp_path, item)) == [
        Sample(
            "2hop__1_2",
            "Who owns the inn where the Orrin rises?",
            (
                Document("Petra Lund owns it.", "Inn", "2hop__1_2-0", gold=True, relevance=1),
                Document("It is a river.", "Orrin", "2hop__1_2-1"),
            ),
            "Petra Lund",
            "musique",
        )
    ]


def test_plain_lines_with_gold_or_relevance(tmp_path: Path) -> None:
    gold = {
        "id": 7,
        "dataset": "mine",
        "question": "  Why?  ",
        "answer": "Because.",
        "documents": [{"id": "a", "title": "T", "text": "one", "gold": True}, {"text": "", "title": None}],
    }
    graded = {"query": "What?", "documents": [{"text": "x", "relevance": n} for n in (2, 0, -1)]}
    path = written(tmp_path, gold, graded)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\n\n"))
    first, second = read_samples(path)
    assert first == Sample(
        "7",
        "Why?",
        (Document("one", "T", "a", gold=True, relevance=1), Document("", "", "7-1")),
        "Because.",
        "mine",
    )
    assert [(d.gold, d.relevance) for d in second.documents] == [(True, 2), (False, 0), (False, -1)]
    assert (second.id, second.question, second.answer, second.dataset) == ("1", "What?", None, "")


def test_ids_are_unique(tmp_path: Path) -> None:
    rows = [
        {"id": id, "question": "q", "documents": [{"id": "d", "text": "x"}] * 2} for id in ("1", None, "1")
    ]
    samples = read_samples(written(tmp_path, *rows))
    assert [s.id for s in samples] == ["1", "1-1", "1-2"]
    assert [d.id for d in samples[0].documents] == ["d", "d-1"]


def test_limit_reads_no_further(tmp_path: Path) -> None:
    row = {"question": "q", "documents": [{"text": "x"}]}
    path = written(tmp_path, row, row)
    path.write_bytes(path.read_bytes() + b"not json\n")
    assert len(read_samples(path, limit=2)) == 2
    with pytest.raises(DataError, match=r"line 3: is not JSON"):
        read_samples(path, limit=3)


PLAIN = {"question": "q", "documents": [{"text": "secret"}]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([PLAIN, {**PLAIN, "documents": [{"title": "t"}]}], ", line 2: documents.0.text: Field required"),
        (
            [{**PLAIN, "documents": [{"text": 5}]}],
            ", line 1: documents.0.text: Input should be a valid string",
        ),
        (
            [{**PLAIN, "documents": [{"text": "x", "gold": 1}]}],
            "documents.0.gold: Input should be a valid bool",
        ),
        ([{**PLAIN, "documents": []}], "documents: List should have at least 1 item"),
        ([{**PLAIN, "question": " "}], "question: String should have at least 1 character"),
        ([{"documents": [{"text": "x"}]}], "question: Field required"),
        (
            [{**PLAIN, "documents": [{"text": "x", "gold": True, "relevance": 0}]}],
            "documents.0: Value error, gold and relevance contradict each other",
        ),
        ([{"question": "q"}], "has none of the fields documents, paragraphs, context"),
        (["just text"], "line 1: is not a JSON object"),
        ([[HOTPOT, {**HOTPOT, "supporting_facts": None}]], ": item 2: supporting_facts: Input should be"),
        (
            [[{k: v for k, v in HOTPOT.items() if k != "supporting_facts"}]],
            "item 1: supporting_facts: Field required",
        ),
        (
            [[{**HOTPOT, "context": {"title": ["a"], "sentences": []}}]],
            "item 1: context: Value error, needs 'title'",
        ),
        (
            [{"question": "q", "paragraphs": [{"title": "t", "paragraph_text": "x"}]}],
            "line 1: paragraphs.0.is_supporting: Field required",
        ),
        ([[]], "holds an empty list"),
        ([], "is empty"),
    ],
)
def test_a_bad_file_is_named_with_place_and_field(tmp_path: Path, lines: list[object], message: str) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(DataError) as caught:
        read_samples(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"question": ', ", line 1: is not JSON"),
        (b'[{"question": "q"},\n{"question" "q"}]', ", line 2: is not JSON"),
        (b'{"question": "\xff"}', ", line 1: is not UTF-8"),
        (b"[" * 100_000, "is not JSON that can be read"),
        (b'{"question": "\\ud800", "documents": [{"text": "x"}]}', "line 1: question: "),
        (b" \n\n", "is empty"),
    ],
)
def test_damaged_bytes(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        read_samples(path)
    assert message in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    for read in (read_samples, data_hash):
        with pytest.raises(DataError, match=r"nowhere.jsonl: cannot be read: No such file"):
            read(tmp_path / "nowhere.jsonl")


def test_data_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abc\r\n")
    assert data_hash(path) == hashlib.sha256(b"abc\r\n").hexdigest()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public data sets do not lie beside the repository")
@pytest.mark.parametrize(
    ("name", "rows", "documents", "golds"),
    [
        ("hotpotqa_dev", 150, {10}, {2}),
        ("2wiki_dev", 60, {10}, {2, 4}),
        ("musique_dev", 80, {20}, {2, 3, 4}),
        ("scifact_top15", 30, {15}, None),
        ("dbpedia_top20_dev", 20, {20}, None),
        ("babi_dev", 150, None, {1, 2, 3}),
    ],
)
def test_real_files(name: str, rows: int, documents: set[int] | None, golds: set[int] | None) -> None:
    samples = read_samples(SHARED / f"{name}.jsonl")
    assert len(samples) == rows == len({s.id for s in samples})
    assert documents is None or {len(s.documents) for s in samples} <= documents
    assert golds is None or {len(s.golds) for s in samples} <= golds
    assert any(s.golds for s in samples)
    assert all(d.gold == (d.relevance > 0) for s in samples for d in s.documents)
