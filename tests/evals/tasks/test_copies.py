"""Copies of a question stay on one side and are recognised later, under any key, in any shape, however they are written."""

import unicodedata

import numpy as np
import pytest

from freemoe.core.errors import DataError
from freemoe.domain_experts.prove.seen_requests import is_seen_request
from freemoe.evals.held_out import ProvenanceRecord, set_aside
from freemoe.evals.seen import SeenHashes, ending_hashes
from freemoe.evals.tasks.documents import Document, FrozenChoice, join_copies
from freemoe.evals.tasks.domains import load_domain, load_domains
from freemoe.recipes import DataSection, recipe_from
from freemoe.text.words import split_words
from tests.rows import write_rows
from tests.tiny import tiny_tokenizer

OPEN = FrozenChoice("x")
RIVERS = ["Aare", "Böge", "Cher", "Dvina", "Éure", "Fulda", "Garonne", "Havel", "Inn", "Jagst"]

# The question comes back as it stands, or written otherwise.
WAYS = {
    "the same": lambda text: text,
    "punctuation": lambda text: text.replace("?", " -- ?!").replace(" which", ", which"),
    "case and space": lambda text: text.upper().replace(" ", "\n "),
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
    "full width": lambda text: text.replace("W", "\uff37").replace(" ", "\u00a0"),
}


def asked(n):
    return f"Which town on the {RIVERS[n % 10]} has {n} mills?", f"Town {n}"


def choice(n, **extra):
    question, answer = asked(n)
    return {"question": question, "choices": ["none", answer], "answer": 1, **extra}


# Rows of other shapes that hold the question and an answer.
SHAPES = {
    "choice": lambda q, a: {"question": q, "choices": [a, "elsewhere"], "answer": 0},
    "target": lambda q, a: {"prompt": q, "target": " " + a},
    "completion": lambda q, a: {"prompt": f"Question: {q}\nAnswer:", "completion": " " + a},
    "instruction": lambda q, a: {"instruction": q, "output": f"The place you look for must be {a}, I would say."},
    "chat": lambda q, a: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]},
}


def load(*specs, group_by=None):
    return load_domain("d", [str(spec) for spec in specs], DataSection(group_by=group_by), tokenizer=tiny_tokenizer())


@pytest.fixture
def write(tmp_path):
    """Writes rows into a file of a name."""
    return lambda name, rows: write_rows(tmp_path / f"{name}.jsonl", rows)


@pytest.fixture
def searched(write):
    """A domain of forty questions."""
    return load(write("b", [choice(n, key=f"mine {n}") for n in range(40)]))


def numbers(documents):
    """Which questions documents ask, by the one number in each."""
    return {"".join(filter(str.isdigit, d.about[0])) for d in documents}


@pytest.mark.parametrize("way", WAYS)
def test_one_file_with_each_question_twice_under_two_keys_is_on_one_side(write, way):
    rows = [choice(n, key=f"a{n}") for n in range(40)]
    rows += [{**row, "question": WAYS[way](row["question"]), "key": f"b{row['key']}"} for row in rows]
    data = load(write("t", rows))
    reported = data.reported.open(OPEN)
    assert len(data.reference) + len(reported) == 80
    assert not numbers(data.reference.documents) & numbers(reported)
    assert len({d.key for d in data.reference.documents}) == len(data.reference) // 2


def test_a_key_joins_what_differs_and_joins_reach_through_copies():
    def document(name, question, key):
        return Document("t", name, key, "choice", question, (" y", " n"), 0, " y", about=(question, "y"))

    one, two, three, other = (
        document("1", "What is a fen?", "k1"),
        document("2", "what is a fen", "k2"),
        document("3", "And what a bog?", "k2"),
        document("4", "And what a moor?", "k4"),
    )
    joined = join_copies([one, two, three, other])
    assert [d.key for d in joined] == ["k1", "k1", "k1", "k4"]
    assert joined[3] is other
    assert join_copies([other, three, two, one])[1:] == joined[2::-1]
    # Another right answer makes another question, unless somebody answers freely.
    wrong = Document("t", "5", "k5", "choice", "What is a fen?", (" y", " n"), 1, " n", about=("What is a fen?", "n"))
    free = Document("t", "6", "k6", "generate", "What is a fen?", about=("What is a fen?",))
    assert len({d.key for d in join_copies([one, wrong])}) == 2
    assert len({d.key for d in join_copies([one, wrong, free])}) == 1


@pytest.mark.parametrize("way", WAYS)
def test_two_files_share_nothing_whatever_keys_their_rows_have(write, way):
    reference = write("r", [choice(n, key=f"r{n}") for n in range(40)])
    test = write("t", [choice(n, key=f"t{n}", question=WAYS[way](asked(n)[0])) for n in range(20, 60)])
    data = load(f"{reference}::{test}")
    assert (len(data.reference), len(data.reported)) == (20, 40)
    assert "20 dropped as also reported" in data.notes[0]
    with pytest.raises(DataError, match=r"all 40 documents .* also stand in"):
        load(f"{reference}::{write('u', [choice(n, key='one') for n in range(40)])}")


def test_tasks_and_domains_share_nothing_either(write):
    pairs = {}
    for part, span in (("a", range(30)), ("b", range(10, 40)), ("c", range(40, 50)), ("d", range(10))):
        make = SHAPES["chat"] if part == "d" else SHAPES["choice"]
        pairs[part] = write(part, [{**make(*asked(n)), "key": f"{part}{n}"} for n in span])
    one, two = f"{pairs['a']}::{pairs['c']}", f"{pairs['c']}::{pairs['b']}"
    data = load(one, two)
    assert numbers(data.reference.documents) == set(map(str, range(10)))
    assert "30 reference documents dropped" in data.notes[-1]
    talk = write("talk", [{**SHAPES["chat"](*asked(n)), "key": f"talk{n}"} for n in range(60, 70)])
    held = {"q": [one], "t": [f"{talk}::{pairs['d']}"]}
    recipe = recipe_from({"command": "build", "model": "x", "output": "y", "domains": held})
    domains = load_domains(recipe, tiny_tokenizer())
    assert numbers(domains["q"].reference.documents) == set(map(str, range(10, 30)))
    assert "10 reference documents dropped: another domain reports on them" in domains["q"].notes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_searched_is_set_aside_in_every_shape(searched, write, shape, way):
    seen = SeenHashes.from_documents(searched.reference.documents, searched.reported.open(OPEN))
    seen = SeenHashes.from_bytes(seen.to_bytes())
    rows = [SHAPES[shape](WAYS[way](asked(n)[0]), asked(n)[1]) for n in range(40)]
    new = [SHAPES[shape](f"Where was baker {n} born?", f"Hill {n}") for n in range(100, 105)]
    plain = load(f"{write('r', new)}::{write('t', rows)}")
    left, found = set_aside(plain, ProvenanceRecord("out", 0, seen))
    assert found["documents"] == len(searched.reference) == 20
    assert numbers(left.reported.open(OPEN)) == numbers(searched.reported.open(OPEN))


def test_shared_questions_are_not_forgotten(searched):
    documents = searched.reference.documents
    assert all(SeenHashes.from_documents(documents, documents).seen_reason(d) for d in documents)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_other_way_round_too(write, shape):
    searched = load(write("b", [SHAPES[shape](*asked(n)) for n in range(20)]))
    seen = SeenHashes.from_documents(searched.reference.documents)
    later = load(f"{write('r', [choice(99)])}::{write('t', [choice(n) for n in range(20)])}")
    left, _ = set_aside(later, ProvenanceRecord("out", 0, seen))
    assert numbers(left.reported.open(OPEN)) == numbers(searched.reported.open(OPEN))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lines", ["{q} {a}", "Question: {q}\nAnswer: {a}", "Q: {q}\n\nA: {a}"])
def test_questions_are_recognised_in_running_text(searched, lines, way):
    documents = searched.reference.documents
    seen = SeenHashes.from_documents(documents)
    for n in range(40):
        question, answer = asked(n)
        text = "It was late. " + lines.format(q=WAYS[way](question), a=answer) + "\nThey went home."
        assert seen.has_text(text) == (str(n) in numbers(documents)), text
    assert not seen.has_text("Which town on the Inn has a castle? Town 3")


@pytest.mark.parametrize("way", WAYS)
def test_requests_of_lm_eval_are_recognised(searched, way):
    documents = searched.reference.documents
    seen = SeenHashes.from_documents(documents)
    for n in range(40):
        question, answer = asked(n)
        question = WAYS[way](question)
        shown = f"Question: {asked(n + 1)[0]}\nAnswer: {asked(n + 1)[1]}\n\nQuestion: {question}\nAnswer:"
        lettered = f"{question}\nA. none\nB. {answer}\nAnswer:"
        doc = {"question": question, "choices": {"text": ["none", answer], "label": ["A", "B"]}}
        cases = {
            "answer": ((shown, " " + answer), "continuation", None),
            "letter": ((lettered, " B"), "continuation", doc),
            "generated": ((shown,), "generation", None),
            "text": ((f"{question} {answer}",), "text", None),
        }
        for name, (arguments, kind, held) in cases.items():
            assert is_seen_request(seen, arguments, kind, held) == (str(n) in numbers(documents)), (name, n)


def test_files_of_older_versions_still_recognise():
    # As written before questions were kept without their answer: own words and answer, in the order of `ending_hashes`.
    (*_, old) = ending_hashes(split_words("Question: how many legs has a cow? Answer:"), split_words(" four"))
    data = SeenHashes(questions=np.array([old], np.uint64), longest=8, documents=1).to_bytes()
    assert b"phrases" not in data
    seen = SeenHashes.from_bytes(data)
    prompt = "Question: who? Answer: me\n\nQuestion: how many legs has a cow?\nAnswer:"
    document = Document("q", "1", "k", "choice", prompt, (" four", " two"), 0, " four")
    assert seen.seen_reason(document) == "question"
    assert is_seen_request(seen, (prompt, " four"), "continuation", None)


def test_a_column_joins_rows_of_one_source(write):
    path = write("t", [choice(n, book=f"book {n // 10}", key=f"k{n}") for n in range(60)])
    data = load(path, group_by="book")
    reported = data.reported.open(OPEN)
    books = [{int(n) // 10 for n in numbers(side)} for side in (data.reference.documents, reported)]
    assert not books[0] & books[1]
    assert len(books[0] | books[1]) == len({d.key for d in (*data.reference.documents, *reported)}) == 6
    assert len({d.key for d in load(path).reference.documents}) == 30


SHAPED = {
    "choice": (choice, "{path}"),
    "text": (lambda n: {"text": f"Mill {n} grinds. " * 30}, "text:{path}"),
}


@pytest.mark.parametrize("shape", SHAPED)
@pytest.mark.parametrize(
    ("column", "message"),
    [
        (lambda n: {"book": "one"}, r"too few to carve|gives no block .*--group-by"),
        (lambda n: {"book": "a"} if n else {}, r"t.jsonl:1: nothing in 'book', .*--group-by.*keys seen: "),
        (lambda n: {"book": ""}, r"t.jsonl:1: nothing in 'book'"),
        (lambda n: {"book": ["a"]}, r"t.jsonl:1: 'book' is \['a'\]; it must be text"),
    ],
)
def test_a_column_that_cannot_group_is_refused(write, shape, column, message):
    make, spec = SHAPED[shape]
    path = write("t", [{**make(n), **column(n)} for n in range(20)])
    with pytest.raises(DataError, match=message):
        load(spec.format(path=path), group_by="book")


@pytest.mark.parametrize("shape", SHAPED)
def test_a_group_larger_than_half_is_said(write, shape):
    make, spec = SHAPED[shape]
    rows = [{**make(n), "book": "large" if n < 30 else f"book {n}"} for n in range(40)]
    data = load(spec.format(path=write("t", rows)), group_by="book")
    reference, reported = data.reference.documents, data.reported.open(OPEN)
    assert not {d.key for d in reference} & {d.key for d in reported}
    assert "more than half" in data.notes[0]
