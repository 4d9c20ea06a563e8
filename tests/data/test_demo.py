"""The built-in questions: their shape, and that they are worth asking."""

from headbank.data.demo import load_demo
from headbank.rerankers.bm25 import words


def test_three_questions_over_eight_paragraphs_each() -> None:
    demo = load_demo()
    assert [(len(q.documents), q.expected) for q in demo] == [(8, (3,)), (8, (2, 5)), (8, (0, 6))]
    for question in demo:
        assert len(set(question.documents)) == 8
        for document in question.documents:
            assert 40 <= len(document.partition("\n")[2].split()) <= 80


def test_a_question_unpacks_into_query_documents_and_indices() -> None:
    query, documents, expected = load_demo()[0]
    assert query == "How long does the battery of the Lumo 3 field recorder last while recording?"
    assert documents[expected[0]].startswith("Lumo 3: power\n")
    assert "31 hours" in documents[expected[0]]


def test_the_chain_needs_both_its_documents() -> None:
    _, documents, (birth, company) = load_demo()[1]
    assert "Odile Varrow" in documents[company] and "Keldermoor" not in documents[company]
    assert documents[birth].startswith("Odile Varrow\n") and "born in Keldermoor" in documents[birth]
    assert "Tarnwick" not in documents[birth]


def test_words_in_common_do_not_answer_the_chain() -> None:
    query, documents, (birth, _) = load_demo()[1]
    shared = [len(set(words(query)) & set(words(document))) for document in documents]
    assert sum(count > shared[birth] for count in shared) >= 2
