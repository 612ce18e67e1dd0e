import json

import pytest

from freemoe.core.errors import DataError
from freemoe.evals.tasks.documents import FrozenChoice
from freemoe.evals.tasks.domains import load_domain
from freemoe.evals.tasks.text_tasks import TextTask, drop_shared_lines, split_tail, thin
from freemoe.text.documents import read_documents
from freemoe.text.files import pack, paragraphs, spread


class Letters:
    """A tokenizer of characters, without offsets."""

    is_fast = False

    def encode(self, text, add_special_tokens=False):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


class FastLetters(Letters):
    is_fast = True

    def __call__(self, text, **_):
        return {"input_ids": self.encode(text), "offset_mapping": [(i, i + 1) for i in range(len(text))]}


def story(i):
    return " ".join(f"word{i}of{j}" for j in range(12)) + ".\n\n"


def test_paragraphs_lose_nothing():
    texts = ["a\nb\n\nc\n\n\nd", "\n e \n\n f", "x\ny\nz"]
    for text in texts:
        assert "".join(paragraphs([text])) == text
    assert paragraphs(["a\nb\n\nc"]) == ["a\nb\n\n", "c"]
    assert paragraphs(["x\ny\n"]) == ["x\n", "y\n"]
    assert paragraphs(["one", "two"]) == ["one\n\n", "two"]


@pytest.mark.parametrize("tokenizer", [Letters(), FastLetters()])
def test_blocks_are_exact_and_know_their_paragraph(tokenizer):
    pieces = ["aaaaaaa\n", "b" * 30 + "\n", "cc"]
    blocks = pack(tokenizer, pieces, 4, run_blocks=2)
    assert all(len(b.tokens) == 4 and tokenizer.decode(b.tokens) == b.text for b in blocks)
    assert "".join(b.text for b in blocks) == "".join(pieces)[:40]
    assert [b.paragraph for b in blocks[:3]] == [0, 0, 1]
    # A long paragraph counts anew every second block.
    assert [b.run for b in blocks if b.paragraph == 1] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_spread_is_even_and_sorted():
    assert spread(3, 5) == [0, 1, 2]
    assert spread(10, 2) == [2, 7]
    assert len(set(spread(1000, 600))) == 600


def test_tail_is_reported_and_a_paragraph_lies_between():
    pieces = [story(i) for i in range(50)]
    head, tail = split_tail(pieces, 0.3)
    assert head == pieces[: len(head)]
    assert tail == pieces[len(head) + 1 :]
    assert 0.2 < len(tail) / 50 < 0.31


def test_lines_that_are_reported_too_leave_the_reference():
    line = "This very line stands in both parts, in 1999 as today.\n"
    other = line.replace("1999", "2001")
    reference = [line.upper().replace(",", " --"), other, "short\n"]
    assert drop_shared_lines(reference, [line, "short\n"]) == ([other, "short\n"], 1)


def test_thin_keeps_evenly_spaced_runs():
    pieces = [f"{i:05d}" for i in range(10000)]
    kept = thin(pieces, 10000, runs=10)
    assert sum(map(len, kept)) <= 11000
    assert kept[0] == "00000"
    assert int(kept[-1]) > 9000
    assert thin(pieces, 10**9) == pieces


def test_text_task_from_one_file(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("".join(story(i) for i in range(300)))
    domain = load_domain("d", [f"text:{path}"], tokenizer=FastLetters(), limit=20)
    (grader,) = domain.graders.values()
    reference, reported = domain.reference.documents, domain.reported.open(FrozenChoice("a test"))
    assert len(reference) == len(reported) == 20
    assert {d.kind for d in reference} == {"text"}
    assert all(len(d.tokens) == 256 and d.answers == (d.reference,) for d in reference)
    assert not {d.key for d in reference} & domain.reported.keys()
    assert "tail (30%)" in domain.notes[0]
    # No paragraph stands in both parts.
    seen = "".join(d.reference for d in reported)
    assert all(d.reference[100:160] not in seen for d in reference)
    nll = grader.grade(reference[0], [(-512.0, False)])
    assert nll == {"nll": 2.0}
    assert grader.grade(reference[0], [(-510.0, False, 255)]) == {"nll": 2.0}
    given = load_domain("d", [f"text:{path}"], tokenizer=FastLetters(), limit=20, text_given=1)
    assert {d.given for d in given.reference.documents} == {1}
    assert [d.tokens for d in given.reference.documents] == [d.tokens for d in reference]
    assert "first 1 given" in given.notes[0]


def test_text_task_from_two_files_and_json(tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.json"
    a.write_text("".join(json.dumps({"text": story(i) * 5}) + "\n" for i in range(9)))
    b.write_text(json.dumps([story(i) * 5 for i in range(20, 29)]))
    domain = load_domain("d", [f"text:{a}::{b}"], tokenizer=Letters())
    assert len(domain.reference) > 5
    assert len(domain.reported) > 5


def test_caps_of_its_own_bound_a_split_and_leave_the_other_as_it_is():
    documents, test = ["".join(map(story, range(60)))], ["".join(map(story, range(100, 160)))]

    def blocks(reference, reported):
        task = TextTask("t", documents, test, tokenizer=Letters(), caps={"reference": reference, "reported": reported})
        return task.reference(), task.reported()

    few, reported = blocks(5, 7)
    more, same = blocks(9, 7)
    assert (len(few), len(more), len(reported)) == (5, 9, 7)
    assert reported == same


def test_text_tasks_refuse(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("too short")
    with pytest.raises(DataError, match="given no tokenizer"):
        load_domain("d", [f"text:{path}"])
    with pytest.raises(DataError, match="gives no block of 256 tokens"):
        load_domain("d", [f"text:{path}"], tokenizer=Letters())
    with pytest.raises(DataError, match=r"no known key.*txt"):
        read_documents(_written(tmp_path / "b.jsonl", '{"txt": "a"}'))
    with pytest.raises(DataError, match="a list of rows or of texts"):
        read_documents(_written(tmp_path / "b.json", '{"text": "a"}'))
    with pytest.raises(DataError, match="not JSON"):
        read_documents(_written(tmp_path / "c.json", "[,]"))
    with pytest.raises(DataError, match="is a folder"):
        read_documents(tmp_path)


def _written(path, text):
    path.write_text(text)
    return path


@pytest.mark.realdata
def test_offsets_of_the_real_tokenizer(stories, data_root):
    tokenizer = stories[1]
    text = (data_root / "tinystories" / "TinyStories-valid_excerpt.txt").read_text()
    task = TextTask("t", [text], tokenizer=tokenizer)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = task.reference()[0]
    assert list(first.tokens) == whole[:256]
    for document in task.reference():
        assert document.reference.strip() in text
