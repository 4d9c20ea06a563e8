"""Labelled questions for calibrating without labelled data: invented facts, questions over one and two of them.

A sample is a small world. Its names are combined from a few coined words, so that a question shares words with
many documents. All documents come from one procedure: same templates, same lengths, and every document of the
asked kind states the asked fact. Only whose fact it states makes a document gold. Templates and word lists are
in `synthetic.json`.
"""

import hashlib
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product

from pydantic import BaseModel

from headbank.errors import InputError
from headbank.types import Document, Sample

SYNTHETIC = "synthetic"
"""The value of `--data` that asks for generated samples; also their `dataset`."""

GENERATOR_VERSION = 1
"""Counts up when `generate` gives other samples for the same arguments."""

MIN_DOCUMENTS = 3
MAX_DOCUMENTS = 100

_ONE_HOP = 0.5
_COMPARISON = 0.25  # of the two-hop questions; the others are chains
_PEER = 0.5  # of the distractors: of a gold's kind; the others are about something that a document mentions
_LINKED = 0.5  # of the peers, where possible: about something that a document mentions
_ECHO = 0.8  # of the documents that may have one
_ASIDE = 0.3  # of the documents name another one without stating anything about it
_FACT = 0.6  # of the sentences that fill a document up, where possible: another fact
_WORDS = (62, 136)  # a document ends with the sentence that reaches a length drawn from this range
_MIN_COINS = 12
_PATTERNS = 4  # ways of making a name from a coined word, per kind


class _Fact(BaseModel):
    value: str
    """A kind, a key of `years` or `lists`, or `river`."""
    noun: str
    documents: list[str]
    questions: list[str]
    chain: list[str] = []
    """Phrases that stand for the value, where that is a thing with facts of its own."""
    echoes: list[str] = []
    """What the document of such a thing may say about its part, naming nobody."""


class _Kind(BaseModel):
    names: list[str]
    article: str = ""
    which: str
    dated: str
    """The fact by which two things of the kind are compared."""
    done: list[str]
    short: list[str]
    """How a document refers to its subject; empty: by the last word of its name."""
    leads: list[str]
    fillers: list[str]
    facts: dict[str, _Fact]


class _Coins(BaseModel):
    starts: list[str]
    middles: list[str]
    ends: list[str]


class _Comparisons(BaseModel):
    dated: list[str]
    when: dict[str, list[str]]
    """Words for `earlier` and for `later`."""
    same: list[str]


class _Templates(BaseModel):
    coins: _Coins
    base_years: tuple[int, int]
    years: dict[str, tuple[int, int]]
    lists: dict[str, list[str]]
    asides: list[str]
    comparisons: _Comparisons
    kinds: dict[str, _Kind]


@cache
def _templates() -> _Templates:
    text = (files("headbank.data") / "synthetic.json").read_text(encoding="utf-8")
    return _Templates.model_validate_json(text)


@cache
def _coins() -> list[str]:
    coins = _templates().coins
    return ["".join(parts) for parts in product(coins.starts, coins.middles, coins.ends)]


@dataclass(frozen=True)
class _Entity:
    kind: str
    name: str
    facts: dict[str, str]

    @property
    def mention(self) -> str:
        """The name as it stands within a sentence."""
        return _templates().kinds[self.kind].article + self.name


@dataclass(frozen=True)
class _Plan:
    question: str
    answer: str
    golds: tuple[_Entity, ...]
    asked: frozenset[tuple[str, str]]
    """Pairs of kind and fact that answer the question, for some name of the kind."""


def generate(count: int, *, seed: int = 0, n_documents: int = 10) -> list[Sample]:
    """Questions over one gold document or two, each with `n_documents` documents of 60 to 160 words.

    About half of the samples have one gold document; of the others, a quarter compare two things (their
    answer is a title, "yes" or "no") and the rest are chains. Sample i depends on `seed`, `n_documents` and i
    alone. Raises InputError for `count` < 1 and for `n_documents` out of [MIN_DOCUMENTS, MAX_DOCUMENTS].
    """
    _check(count, n_documents)
    return [_sample(seed, i, n_documents) for i in range(count)]


def synthetic_hash(count: int, seed: int, n_documents: int) -> str:
    """sha256, in hex, of the generator's version and arguments: what a bank notes as the hash of its data."""
    _check(count, n_documents)
    key = f"{SYNTHETIC} version={GENERATOR_VERSION} {count=} {seed=} {n_documents=}"
    return hashlib.sha256(key.encode()).hexdigest()


def _check(count: int, n_documents: int) -> None:
    if count < 1:
        raise InputError("count", "must be at least 1", 1)
    if n_documents < MIN_DOCUMENTS:
        raise InputError("n_documents", f"must be at least {MIN_DOCUMENTS}", MIN_DOCUMENTS)
    if n_documents > MAX_DOCUMENTS:
        raise InputError("n_documents", f"must be at most {MAX_DOCUMENTS}", MAX_DOCUMENTS)


def _sample(seed: int, index: int, n_documents: int) -> Sample:
    rng = random.Random(f"{seed}/{index}/{n_documents}")
    world = _World(rng, n_documents)
    if rng.random() < _ONE_HOP:
        plan = _lookup(world)
    else:
        plan = _comparison(world) if rng.random() < _COMPARISON else _chain(world)
    entities = list(plan.golds)
    while len(entities) < n_documents:
        entities.append(_distractor(world, plan, entities))
    rng.shuffle(entities)
    id = f"{SYNTHETIC}-{seed}-{index}"
    documents = []
    for i, entity in enumerate(entities):
        gold = entity in plan.golds
        # Gold documents do not name each other in passing: only the fact that is asked for connects them.
        others = [e for e in entities if e is not entity and not (gold and e in plan.golds)]
        text = world.text(entity, plan.asked, _echoes(entity, entities), rng.choice(others))
        documents.append(Document(text, entity.name, f"{id}-{i}", gold=gold, relevance=int(gold)))
    return Sample(id, plan.question, tuple(documents), plan.answer, SYNTHETIC)


class _World:
    """The names and values that one sample draws on."""

    def __init__(self, rng: random.Random, n_documents: int) -> None:
        templates = _templates()
        size = max(_MIN_COINS, n_documents // 2)
        coins = rng.sample(_coins(), 3 * size)
        base = rng.randint(*templates.base_years)
        self.rng = rng
        self.pools = {**templates.lists, "river": coins[2 * size :]}
        for name, (first, last) in templates.years.items():
            self.pools[name] = [str(base + year) for year in range(first, last + 1)]
        for name, kind in templates.kinds.items():
            patterns = rng.sample(kind.names, _PATTERNS)
            # A surname stands in most sentences of its document; if all were names of places and firms too,
            # word overlap would mislead far more than it does in published data.
            start = size // 2 if name == "person" else 0
            own = coins[start : start + size]
            self.pools[name] = [pattern.format(c=coin) for pattern in patterns for coin in own]
        self.reserved: dict[tuple[str, str], str] = {}
        """Values that answer the question, by kind and fact: no further thing of the kind may have them."""
        self._fillers = {name: rng.sample(k.fillers, len(k.fillers)) for name, k in templates.kinds.items()}

    def pick(self, pool: str, avoid: Collection[str] = (), apart: Iterable[str] = ()) -> str:
        """A value of the pool that is not in `avoid` and shares no word with the names in `apart`."""
        words = {word for name in apart for word in name.split()}
        return self.rng.choice(
            [v for v in self.pools[pool] if v not in avoid and words.isdisjoint(v.split())]
        )

    def entity(
        self, kind: str, name: str, fixed: Mapping[str, str] | None = None, avoid: Collection[str] = ()
    ) -> _Entity:
        """A thing whose facts all differ and do not repeat a word of its name, so that each value is one fact's."""
        facts = dict(fixed or {})
        for key, fact in _templates().kinds[kind].facts.items():
            if key not in facts:
                taken = {*avoid, *facts.values(), self.reserved.get((kind, key), "")}
                facts[key] = self.pick(fact.value, taken, [name])
        return _Entity(kind, name, facts)

    def text(
        self, entity: _Entity, asked: Collection[tuple[str, str]], echoes: Sequence[str], other: _Entity
    ) -> str:
        """A paragraph that states the asked facts, then other facts and embellishments up to a drawn length."""
        rng = self.rng
        kind = _templates().kinds[entity.kind]
        lead = self._written(rng.choice(kind.leads), entity, other)
        stated: list[str] = []
        extra: list[str] = []
        for key, fact in kind.facts.items():
            sentence = rng.choice(fact.documents).replace("{v}", entity.facts[key])
            (stated if (entity.kind, key) in asked else extra).append(sentence)
        if echoes and rng.random() < _ECHO:
            stated.append(rng.choice(echoes))
        if rng.random() < _ASIDE:
            stated.append(rng.choice(_templates().asides))
        sentences = [self._written(sentence, entity, other) for sentence in stated]
        rng.shuffle(extra)
        length = rng.randint(*_WORDS)
        while len(" ".join([lead, *sentences]).split()) < length:
            more = extra.pop() if extra and rng.random() < _FACT else self._filler(entity.kind)
            sentences.append(self._written(more, entity, other))
        rng.shuffle(sentences)
        return " ".join([lead, *sentences])

    def _filler(self, kind: str) -> str:
        """The kind's next one in turn, so that documents repeat each other as little as possible."""
        sentence = self._fillers[kind].pop(0)
        self._fillers[kind].append(sentence)
        return sentence

    def _written(self, sentence: str, entity: _Entity, other: _Entity) -> str:
        short = _templates().kinds[entity.kind].short or [entity.name.split()[-1]]
        return _capital(sentence.format(x=entity.mention, s=self.rng.choice(short), o=other.mention))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _lookup(world: _World) -> _Plan:
    """One document holds the answer."""
    kinds = _templates().kinds
    kind = world.rng.choice(list(kinds))
    key, fact = world.rng.choice(list(kinds[kind].facts.items()))
    entity = world.entity(kind, world.pick(kind))
    answer = entity.facts[key]
    world.reserved[kind, key] = answer
    question = world.rng.choice(fact.questions).format(x=entity.mention)
    return _Plan(_capital(question), answer, (entity,), frozenset({(kind, key)}))


def _chain(world: _World) -> _Plan:
    """The first document names the thing whose document holds the answer."""
    rng, kinds = world.rng, _templates().kinds
    first = rng.choice(list(kinds))
    link_key, link = rng.choice([(key, fact) for key, fact in kinds[first].facts.items() if fact.chain])
    second = link.value
    key, fact = rng.choice(
        [(key, fact) for key, fact in kinds[second].facts.items() if (second, key) != (first, link_key)]
    )
    end = world.entity(second, world.pick(second))
    answer = end.facts[key]
    name = world.pick(first, {*end.facts.values()}, [end.name, answer])
    start = world.entity(first, name, {link_key: end.name}, {answer})
    world.reserved[first, link_key] = end.name
    world.reserved[second, key] = answer
    question = rng.choice(fact.questions).format(x=rng.choice(link.chain).format(x=start.mention))
    return _Plan(_capital(question), answer, (start, end), frozenset({(first, link_key), (second, key)}))


def _comparison(world: _World) -> _Plan:
    """Two documents have to be held against each other: which came first, or whether a value is the same."""
    rng, words = world.rng, _templates().comparisons
    name = rng.choice(list(_templates().kinds))
    kind = _templates().kinds[name]
    dated = rng.random() < 0.5
    key = kind.dated if dated else rng.choice([k for k, f in kind.facts.items() if not _is_year(f)])
    a = world.entity(name, world.pick(name))
    value = a.facts[key]
    same = not dated and rng.random() < 0.5
    other = world.pick(name, {a.name, *a.facts.values()}, [value])
    b = world.entity(name, other, {key: value} if same else None, {a.name} if same else {a.name, value})
    if dated:
        when = rng.choice(list(words.when))
        terms = {"done": rng.choice(kind.done), "when": rng.choice(words.when[when]), "which": kind.which}
        template = rng.choice(words.dated)
        answer = (min if when == "earlier" else max)((a, b), key=lambda e: int(e.facts[key])).name
    else:
        terms = {"noun": kind.facts[key].noun}
        template = rng.choice(words.same)
        answer = "yes" if same else "no"
    question = template.format(a=a.mention, b=b.mention, **terms)
    return _Plan(_capital(question), answer, (a, b), frozenset({(name, key)}))


def _echoes(entity: _Entity, entities: Iterable[_Entity]) -> list[str]:
    """What fits the part that the entity plays in other documents, or any part if it plays none."""
    links = [
        (fact, e.facts[key] == entity.name)
        for e in entities
        for key, fact in _templates().kinds[e.kind].facts.items()
        if fact.value == entity.kind
    ]
    played = [fact for fact, plays in links if plays]
    return [echo for fact in played or [fact for fact, _ in links] for echo in fact.echoes]


def _is_year(fact: _Fact) -> bool:
    return fact.value in _templates().years


def _distractor(world: _World, plan: _Plan, entities: Collection[_Entity]) -> _Entity:
    """Another thing, mostly of a gold's kind or mentioned by a document, and never the answer itself."""
    rng, kinds = world.rng, _templates().kinds
    taken = {plan.answer, *(e.name for e in entities)}
    mentioned = [
        (fact.value, e.facts[key])
        for e in entities
        for key, fact in kinds[e.kind].facts.items()
        if fact.chain and e.facts[key] not in taken
    ]
    if not mentioned or rng.random() < _PEER:
        kind = rng.choice(plan.golds).kind
    else:
        kind = rng.choice(mentioned)[0]
    linked = [name for other, name in mentioned if other == kind]
    name = rng.choice(linked) if linked and rng.random() < _LINKED else world.pick(kind, taken)
    return world.entity(kind, name)
