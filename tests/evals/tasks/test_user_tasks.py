import pytest

from freemoe.core.errors import DataError
from freemoe.evals.tasks.documents import FrozenChoice
from freemoe.evals.tasks.domains import load_domain
from freemoe.evals.tasks.task import EvalTask
from freemoe.evals.tasks.user_tasks import UserTask, read_task_file
from freemoe.recipes import DataSection
from freemoe.text.shapes import answer_index
from tests.rows import write_rows as write


def choice(i, **extra):
    return {"question": f"Is {i} even?", "choices": ["yes", "no"], "answer": i % 2, **extra}


def documents(folder, rows):
    return read_task_file(write(folder / "t.jsonl", rows), "t")[1]


def test_choices_become_documents(tmp_path):
    rows = [choice(4, id="four", field="small", key="4"), {**choice(5), "answer": "B"}, {**choice(6), "answer": "yes"}]
    first, second, third = documents(tmp_path, rows)
    assert (first.prompt, first.answers, first.gold, first.reference) == ("Is 4 even?", (" yes", " no"), 0, " yes")
    assert (first.kind, first.id, first.field, second.gold, third.gold) == ("choice", "t:four", "small", 1, 0)
    assert first.key != second.key


def test_targets_become_documents_verbatim(tmp_path):
    (document,) = documents(tmp_path, [{"prompt": "1 + 1 =", "target": " 2"}])
    assert (document.kind, document.answers, document.gold, document.reference) == ("target", (" 2",), 0, " 2")


def test_key_ignores_wrong_choices_case_and_space(tmp_path):
    rows = [choice(2), {**choice(2), "question": "is 2  EVEN?", "choices": ["maybe", "yes"], "answer": 1}]
    a, b = documents(tmp_path, rows)
    assert a.key == b.key


BAD = {
    "not JSON": (["{"], r"t.jsonl:1: not JSON"),
    "missing key": ([choice(1), {"question": "q", "chocies": []}], "t.jsonl:2: missing 'choices', 'answer'; .*chocies"),
    "plain text": ([{"text": "x"}], "plain text; write text:FILE"),
    "mixed": ([choice(1), {"prompt": "p", "target": "t"}], r"t.jsonl:2: a 'target' line in a file of 'choice'"),
    "index too high": ([{**choice(1), "answer": 2}], r"'answer' is 2, .* 2 choices; allowed: an index from 0 to 1"),
    "index below": ([{**choice(1), "answer": -1}], r"'answer' is -1"),
    "letter too high": ([{**choice(1), "answer": "C"}], r"'answer' is 'C', which is none of the 2"),
    "bool": ([{**choice(1), "answer": True}], r"'answer' is True"),
    "null": ([{**choice(1), "answer": None}], r"'answer' is None"),
    "one choice": ([{**choice(1), "choices": ["a"]}], "at least 2"),
    "twice": ([{**choice(1), "choices": ["a", "a"]}], "'a' stands there twice"),
    "choices no list": ([{**choice(1), "choices": "ab"}], "'choices' is 'ab'"),
    "blank question": ([{**choice(1), "question": " "}], "'question' is ' '"),
    "target no text": ([{"prompt": "p", "target": 3}], "'target' is 3"),
    "id twice": ([choice(1, id="a"), choice(2, id="a")], r"t.jsonl:2: the id 'a' was used on line 1"),
    "field no text": ([choice(1, field=["a"])], "'field' is"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_name_file_line_and_value(tmp_path, name):
    rows, message = BAD[name]
    with pytest.raises(DataError, match=message):
        documents(tmp_path, rows)


def test_letter_and_text_that_disagree_are_refused():
    assert answer_index("w", "A", ["A", "B"]) == 0
    assert answer_index("w", "b", ["x", "y"]) == 1
    with pytest.raises(DataError, match="letter of one choice and the text of another"):
        answer_index("w", "A", ["B", "A"])


@pytest.mark.parametrize(("content", "message"), [(b"", "empty"), (b" \n", "empty"), (b"\xff\xfe", "not UTF-8")])
def test_unreadable_files(tmp_path, content, message):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_task_file(path, "t")


def test_one_file_is_carved_by_content_key(tmp_path):
    rows = [choice(i, key=str(i // 2)) for i in range(40)]
    task = UserTask("t", write(tmp_path / "t.jsonl", rows))
    assert isinstance(task, EvalTask)
    reference, reported = task.reference(), task.reported()
    assert len(reference) == len(reported) == 20
    assert not {d.key for d in reference} & {d.key for d in reported}
    assert "carved" in task.note
    assert "seed 0" in task.note
    assert UserTask("t", tmp_path / "t.jsonl").reference() == reference
    assert UserTask("t", tmp_path / "t.jsonl", seed=1).reference() != reference


def test_carving_does_not_depend_on_line_order(tmp_path):
    rows = [choice(i, id=str(i)) for i in range(30)]
    one = UserTask("t", write(tmp_path / "a.jsonl", rows)).reference()
    two = UserTask("t", write(tmp_path / "b.jsonl", rows[::-1])).reference()
    assert {d.prompt for d in one} == {d.prompt for d in two}


def test_two_files_and_a_folder(tmp_path):
    write(tmp_path / "reference.jsonl", [choice(i) for i in range(6)])
    write(tmp_path / "test.jsonl", [choice(i) for i in range(4, 8)])
    for spec in (f"{tmp_path}/reference.jsonl::{tmp_path}/test.jsonl", str(tmp_path)):
        domain = load_domain("d", [spec])
        assert [d.prompt for d in domain.reference.documents] == [f"Is {i} even?" for i in range(4)]
        assert len(domain.reported.open(FrozenChoice("x"))) == 4
        assert "2 dropped as also reported" in domain.notes[0]
        (name,) = domain.graders
        assert name == tmp_path.name


def test_two_files_that_cannot_be_two_splits(tmp_path):
    rows = {"a": choice(1), "b": choice(1), "c": {"prompt": "p", "target": "t"}}
    a, b, c = (write(tmp_path / f"{name}.jsonl", [row]) for name, row in rows.items())
    for files, said in (((a, b), "all 1 documents of"), ((a, c), "one format"), ((a,), "too few to carve")):
        with pytest.raises(DataError, match=said):
            UserTask("t", *files)
    with pytest.raises(DataError, match="same file"):
        load_domain("d", [f"{a}::{a}"])


def test_limit_is_balanced_over_fields_and_keeps_file_order(tmp_path):
    rows = [choice(i, field="abc"[i % 3] if i < 40 else "a") for i in range(120)]
    task = UserTask("t", write(tmp_path / "t.jsonl", rows), data=DataSection(limit=9))
    fields = [d.field for d in task.reference()]
    assert sorted(fields) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    order = [d.index for d in task.reference()]
    assert order == sorted(order)
    assert "reference 9 of 60, reported 9 of 60" in task.note


def test_grades(tmp_path):
    rows = [{"question": f"q{i}", "choices": ["a", "much longer"], "answer": 0} for i in range(4)]
    task = UserTask("t", write(tmp_path / "t.jsonl", rows))
    document = task.reference()[0]
    assert task.grade(document, [(-1.0, True), (-2.0, False)]) == {"acc": 1.0, "acc_norm": 0.0}
    assert task.grade(document, [(-3.0, False), (-2.0, False)]) == {"acc": 0.0, "acc_norm": 0.0}
    # Equal likelihoods: the first choice.
    assert task.grade(document, [(-2.0, False), (-2.0, False)])["acc"] == 1.0
    targets = UserTask("u", write(tmp_path / "u.jsonl", [{"prompt": f"p{i}", "target": "t"} for i in range(4)]))
    assert targets.grade(targets.reported()[0], [(-1.0, True)]) == {"acc": 1.0}
    assert targets.grade(targets.reported()[0], [(-1.0, False)]) == {"acc": 0.0}
