"""Generated questions: a reader of the templates solves every one, and no shortcut does."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest

from headbank.data import synthetic
from headbank.data.readers import read_samples
from headbank.data.synthetic import GENERATOR_VERSION, generate, synthetic_hash
from headbank.errors import InputError
from headbank.rerankers.bm25 import BM25
from headbank.types import Document, RankOptions, Sample

TEMPLATES = json.loads((files("headbank.data") / "synthetic.json").read_text(encoding="utf-8"))
KINDS: dict[str, dict[str, Any]] = TEMPLATES["kinds"]
COMPARISONS: dict[str, Any] = TEMPLATES["comparisons"]
WHEN = [word for synonyms in COMPARISONS["when"].values() for word in synonyms]
FACTS = {(kind, key): fact for kind, k in KINDS.items() for key, fact in k["facts"].items()}
ECHOES = [echo for fact in FACTS.values() for echo in fact.get("echoes", [])]

GOLDEN = (1, "4d0d690bf90c42d2a70c2e66a374719aa515e8ea0d6f6878057d37d5dd12672e")
"""The generator's version and the sha256 of what it gives: when the second changes, the first has to."""


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return generate(300, seed=5)


class Parsed(NamedTuple):
    kind: str
    title: str
    facts: dict[str, str]

    @property
    def mention(self) -> str:
        return str(KINDS[self.kind].get("article", "")) + self.title


class Solution(NamedTuple):
    answer: str
    used: frozenset[tuple[int, str]]
    """Index of a document, and the fact taken from it."""


@cache
def pattern(template: str, **slots: str) -> re.Pattern[str]:
    """A template as a regular expression: a slot is what `slots` says, or a group that takes anything."""
    parts = re.split(r"\{(\w+)\}", template)
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [slots.get(name, f"(?P<{name}>.+)") for name in parts[1::2]]
    return re.compile("".join(parts), re.IGNORECASE)


@cache
def parsed(document: Document) -> Parsed:
    """The facts that a document states; fails on a sentence that has no meaning, or two."""
    lead, *sentences = (s.strip() for s in re.findall(r"[^.]+\.", document.text))
    (kind,) = (
        kind
        for kind, k in KINDS.items()
        for template in k["leads"]
        if template.format(x=k.get("article", "") + document.title).lower() == lead.lower()
    )
    short = "|".join(KINDS[kind]["short"]) or r"\w+"
    facts: dict[str, str] = {}
    for sentence in sentences:
        found = [
            (key, match["v"])
            for key, fact in KINDS[kind]["facts"].items()
            for template in fact["documents"]
            if (match := pattern(template, s=f"(?:{short})").fullmatch(sentence))
        ]
        if found:
            ((key, value),) = found
            assert key not in facts
            facts[key] = value
        else:
            others = [*KINDS[kind]["fillers"], *TEMPLATES["asides"], *ECHOES]
            assert any(pattern(t, s=f"(?:{short})").fullmatch(sentence) for t in others), sentence
    return Parsed(kind, document.title, facts)


def lookups(phrase: str, documents: list[Parsed], form: str) -> Iterator[Solution]:
    """Answers to a question (`form` is "questions") or names for a phrase that stands for a thing ("chain")."""
    for (kind, key), fact in FACTS.items():
        for match in (pattern(template).fullmatch(phrase) for template in fact.get(form, [])):
            for i, document in enumerate(documents):
                if match is None or document.kind != kind or key not in document.facts:
                    continue
                if document.mention.lower() == match["x"].lower():
                    yield Solution(document.facts[key], frozenset({(i, key)}))
                elif form == "questions":
                    for inner in lookups(match["x"], documents, "chain"):
                        if inner.answer == document.title:
                            yield Solution(document.facts[key], inner.used | {(i, key)})


def comparisons(question: str, documents: list[Parsed]) -> Iterator[Solution]:
    for (kind, key), fact in FACTS.items():
        dated = key == KINDS[kind]["dated"]
        slots = {
            "noun": re.escape(fact["noun"]),
            "which": KINDS[kind]["which"],
            "done": f"(?:{'|'.join(KINDS[kind]['done'])})",
            "when": f"(?P<when>{'|'.join(WHEN)})",
        }
        for template in COMPARISONS["dated" if dated else "same"]:
            match = pattern(template, **slots).fullmatch(question)
            names = {match["a"].lower(), match["b"].lower()} if match else set()
            found = [i for i, d in enumerate(documents) if d.kind == kind and d.mention.lower() in names]
            if match is None or len(found) != 2:
                continue
            values = [documents[i].facts[key] for i in found]
            answer = "yes" if values[0] == values[1] else "no"
            if dated:
                assert answer == "no"
                best: Callable[..., int] = min if match["when"] in COMPARISONS["when"]["earlier"] else max
                answer = documents[best(found, key=lambda i: int(documents[i].facts[key]))].title
            yield Solution(answer, frozenset((i, key) for i in found))


def compares(sample: Sample) -> bool:
    return sample.answer in {"yes", "no", *(d.title for d in sample.documents)}


def words(document: Document) -> int:
    return len(document.text.split())


def test_every_question_has_one_answer_which_takes_all_golds_and_nothing_else(samples: list[Sample]) -> None:
    for sample in samples:
        documents = [parsed(d) for d in sample.documents]
        solutions = {
            *lookups(sample.question, documents, "questions"),
            *comparisons(sample.question, documents),
        }
        ((answer, used),) = solutions
        assert answer == sample.answer
        assert {i for i, _ in used} == set(sample.golds)
        # Where the asked fact is looked up, no distractor gives the same value for it.
        if not compares(sample):
            for i, key in used:
                same = [d for d in documents if d.kind == documents[i].kind and key in d.facts]
                assert [d.facts[key] for d in same].count(documents[i].facts[key]) == 1


def test_one_gold_holds_the_answer_of_a_lookup_or_chain(samples: list[Sample]) -> None:
    for sample in (s for s in samples if not compares(s)):
        answer = str(sample.answer)
        assert sum(answer in sample.documents[i].text for i in sample.golds) == 1
        assert answer not in sample.question
        assert all(answer != d.title for d in sample.documents)


def test_the_answer_of_a_comparison_is_yes_no_or_one_of_the_two(samples: list[Sample]) -> None:
    answers = Counter(
        s.answer if s.answer in ("yes", "no") else "title"
        for s in samples
        if compares(s) and s.answer in {"yes", "no", *(s.documents[i].title for i in s.golds)}
    )
    assert answers.total() == sum(map(compares, samples))
    assert min(answers["yes"], answers["no"]) >= 5
    assert answers["title"] >= 10


def test_half_of_the_questions_take_two_documents(samples: list[Sample]) -> None:
    counts = Counter(len(s.golds) for s in samples)
    assert counts.keys() == {1, 2}
    assert 120 <= counts[2] <= 180
    assert 20 <= sum(map(compares, samples)) <= 60


def test_every_document_is_a_paragraph_of_its_own(samples: list[Sample]) -> None:
    for sample in samples:
        assert len(sample.documents) == 10
        assert len({d.text for d in sample.documents}) == len({d.title for d in sample.documents}) == 10
        assert all(60 <= words(d) <= 160 and d.text.count(".") >= 3 for d in sample.documents)
        assert all(d.text.isascii() and d.text.isprintable() for d in sample.documents)
        assert not re.search(r"[{}]|  ", sample.question + "".join(d.content for d in sample.documents))


def test_gold_documents_stand_anywhere(samples: list[Sample]) -> None:
    places = Counter(i for s in samples for i in s.golds)
    expected = places.total() / 10
    chi_square = sum((places[i] - expected) ** 2 / expected for i in range(10))
    assert chi_square < 27.9  # 9 degrees of freedom, p = 0.001


def test_gold_documents_are_as_long_as_the_others(samples: list[Sample]) -> None:
    gold = mean(words(d) for s in samples for d in s.documents if d.gold)
    other = mean(words(d) for s in samples for d in s.documents if not d.gold)
    assert gold == pytest.approx(other, rel=0.03)


@pytest.mark.parametrize(
    "choose",
    [
        lambda s: max(s.documents, key=words),
        lambda s: min(s.documents, key=words),
        lambda s: s.documents[0],
        lambda s: s.documents[-1],
        lambda s: max(s.documents, key=lambda d: d.text.count(".")),
    ],
    ids=["longest", "shortest", "first", "last", "most sentences"],
)
def test_a_choice_blind_to_the_question_is_no_better_than_chance(
    samples: list[Sample], choose: Callable[[Sample], Document]
) -> None:
    chance = mean(len(s.golds) / 10 for s in samples)
    assert abs(mean(choose(s).gold for s in samples) - chance) < 0.062  # three standard errors


def test_words_in_common_help_about_as_much_as_in_hotpotqa(samples: list[Sample]) -> None:
    hits: dict[int, list[float]] = {1: [], 2: []}
    for sample in samples:
        n = len(sample.golds)
        ranking = BM25().rank(sample.question, [d.content for d in sample.documents], RankOptions())
        hits[n].append(len({*ranking.order[:n]} & {*sample.golds}) / n)
    assert 0.5 < mean(hits[2]) < 0.75  # HotpotQA's distractor setting: 0.66
    assert 0.55 < mean(hits[1]) < 0.9


def test_templates_are_many_and_all_are_used(samples: list[Sample]) -> None:
    assert len(FACTS) >= 8
    for fact in FACTS.values():
        assert len(set(fact["documents"])) == len(fact["documents"]) >= 3
        assert len(set(fact["questions"])) == len(fact["questions"]) >= 3
        assert ("chain" in fact) == ("echoes" in fact) == (fact["value"] in KINDS)
        assert len(fact.get("chain", "123")) >= 3
    stated = {(p.kind, key) for s in samples[:100] for p in map(parsed, s.documents) for key in p.facts}
    assert stated == FACTS.keys()
    asked = Counter(parsed(s.documents[s.golds[0]]).kind for s in samples)
    assert asked.keys() == KINDS.keys()


def test_a_sample_depends_on_seed_and_index_alone() -> None:
    five = generate(5, seed=3)
    assert five == generate(5, seed=3)
    assert five[:2] == generate(2, seed=3)
    assert [s.id for s in five] == [f"synthetic-3-{i}" for i in range(5)]
    assert {s.dataset for s in five} == {synthetic.SYNTHETIC} == {"synthetic"}
    others = generate(5, seed=4)
    assert not {s.question for s in five} & {s.question for s in others}
    assert len({s.question for s in five}) == 5


@pytest.mark.parametrize("n_documents", [3, 4, 25])
def test_any_number_of_documents(n_documents: int) -> None:
    for sample in generate(12, seed=1, n_documents=n_documents):
        assert len({d.title for d in sample.documents}) == n_documents
        assert sample.golds and sample.distractors
        documents = [parsed(d) for d in sample.documents]
        solutions = {
            *lookups(sample.question, documents, "questions"),
            *comparisons(sample.question, documents),
        }
        ((answer, used),) = solutions
        assert (answer, {i for i, _ in used}) == (sample.answer, set(sample.golds))


def test_samples_survive_a_file_of_the_plain_format(tmp_path: Path) -> None:
    samples = generate(4, seed=2)
    rows = [
        {
            "id": s.id,
            "dataset": s.dataset,
            "question": s.question,
            "answer": s.answer,
            "documents": [
                {"id": d.id, "title": d.title, "text": d.text, "gold": d.gold} for d in s.documents
            ],
        }
        for s in samples
    ]
    path = tmp_path / "synthetic.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_samples(path) == samples


@pytest.mark.parametrize(
    ("count", "n_documents", "field", "limit"),
    [(0, 10, "count", 1), (1, 2, "n_documents", 3), (1, 101, "n_documents", 100)],
)
def test_arguments_out_of_range(count: int, n_documents: int, field: str, limit: int) -> None:
    calls: list[Callable[[], object]] = [
        lambda: generate(count, n_documents=n_documents),
        lambda: synthetic_hash(count, 0, n_documents),
    ]
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert (caught.value.field, caught.value.limit) == (field, limit)


def test_the_hash_tells_versions_and_arguments_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = [synthetic_hash(*arguments) for arguments in ((3, 0, 10), (4, 0, 10), (3, 1, 10), (3, 0, 11))]
    assert synthetic_hash(3, 0, 10) == hashes[0]
    assert all(re.fullmatch(r"[0-9a-f]{64}", value) for value in hashes)
    monkeypatch.setattr(synthetic, "GENERATOR_VERSION", GENERATOR_VERSION + 1)
    assert len({*hashes, synthetic_hash(3, 0, 10)}) == 5


def test_the_version_counts_up_with_the_output() -> None:
    content = [
        [s.id, s.question, s.answer, [[d.id, d.title, d.text, d.gold] for d in s.documents]]
        for s in generate(20, seed=0)
    ]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    assert (GENERATOR_VERSION, digest) == GOLDEN, "bump GENERATOR_VERSION, then note both here"
