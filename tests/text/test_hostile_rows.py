"""Rows and texts of others: whatever stands in a column, it is read or refused with its place, and soon."""

import contextlib
import gzip
import json
import time

import pytest

from freemoe.core.errors import DataError
from freemoe.evals.tasks.benchmark_files import jsonl_gz_reader
from freemoe.evals.tasks.user_tasks import read_task_file
from freemoe.text import rows
from freemoe.text.files import read_json_lines, split_paragraphs
from freemoe.text.rows import MOST_CHOICES, MOST_MESSAGES, DataRow, read_rows
from freemoe.text.shapes import SHAPES, ChoiceItem, detect_shape, read_item

HOSTILE = {
    "nothing": None,
    "a number": 5,
    "below zero": -1,
    "a huge number": 10**400,
    "yes": True,
    "empty": "",
    "blank": " \n ",
    "a list": [],
    "lists": [[[[]]]],
    "a mapping": {},
    "texts and labels": {"text": ["a", "b"], "label": [1, [2]]},
    "labels that are none": {"text": ["a", "b"], "label": 5},
    "more labels than texts": {"text": ["a", "b"], "label": ["A", "B", "C"]},
    "a list in words": "[1, 2",
    "brackets": "[" * 10**5,
    "signs": "[1," + "-" * 10**5,
    "a program": "[__import__('os').mkdir('x')]",
    "an escape": "\x1b[31mred",
    "long": "x" * 10**6,
    "a superscript": "²",
}

GOOD = {
    "chat": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "choice": {"question": "q", "choices": ["a", "b"], "answer": 0},
    "lettered": {"question": "q", "A": "a", "B": "b", "answer": "A"},
    "target": {"prompt": "p", "target": "t"},
    "completion": {"prompt": "p", "completion": "c"},
    "instruction": {"instruction": "i", "output": "o"},
    "text": {"text": "t"},
}
CASES = [(shape, column) for shape, row in GOOD.items() for column in row]


@pytest.mark.parametrize(("shape", "column"), CASES)
def test_hostile_cells_are_read_or_refused_with_their_place(shape, column):
    for name, value in HOSTILE.items():
        row = DataRow(7, "a.jsonl:7", {**GOOD[shape], column: value})
        began = time.monotonic()
        try:
            item = read_item(row, SHAPES[shape], row)
        except DataError as error:
            said = str(error)
            assert said.startswith("a.jsonl:7"), name
            assert len(said) < 1000, name
        else:
            if isinstance(item, ChoiceItem):
                assert 0 <= item.gold < len(item.choices)
        assert time.monotonic() - began < 10, name


def test_100_001_choices_are_refused_at_once():
    for choices in ([str(i) for i in range(100_001)], [str(i) for i in range(100_000)] + ["99999"]):
        row = DataRow(1, "a.jsonl:1", {"question": "q", "choices": choices, "answer": 0})
        began = time.monotonic()
        with pytest.raises(DataError, match=r"a.jsonl:1: 100,001 choices; a question has at most 1,000"):
            read_item(row, detect_shape(row), row)
        assert time.monotonic() - began < 2
    row = DataRow(1, "a", {"question": "q", "choices": [str(i) for i in range(MOST_CHOICES)], "answer": 0})
    assert len(read_item(row, detect_shape(row), row).choices) == MOST_CHOICES


def test_conversations_are_bounded():
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = DataRow(1, "a.jsonl:1", {"messages": turn * (MOST_MESSAGES // 2)})
    assert len(read_item(row, detect_shape(row), row).turns) == MOST_MESSAGES // 2
    row = DataRow(1, "a.jsonl:1", {"messages": turn * MOST_MESSAGES})
    with pytest.raises(DataError, match="1,000 messages; a conversation has at most 500"):
        read_item(row, detect_shape(row), row)


def test_rows_of_many_columns_are_told_in_a_line():
    row = DataRow(1, "a.jsonl:1", {f"k{i}": i for i in range(10**5)})
    with pytest.raises(DataError, match="and 99,960 more") as caught:
        detect_shape(row)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("name", ["id", "field"])
def test_names_of_rows_are_short(name, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({**GOOD["choice"], name: "x" * 401}) + "\n")
    with pytest.raises(DataError, match=f"'{name}' has 401 characters; at most 400"):
        read_task_file(file, "a")


@pytest.mark.parametrize(
    "text", ["word\n" * 300_000, "\n" * 300_000, "w\n\n" * 100_000, "x" * 3_000_000, "w\n \n" * 50_000]
)
def test_paragraphs_of_large_texts_take_seconds(text):
    began = time.monotonic()
    found = split_paragraphs(text)
    assert time.monotonic() - began < 20
    assert "".join(found) == text


def test_a_line_that_is_no_json_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    for line, reason in (
        ("{", "not JSON"),
        ('{"a": NaN}', "NaN"),
        ('{"a": "\\ud800"}', "surrogate"),
        ("[" * 10**5, "deep"),
    ):
        file.write_text(f'{{"text": "x"}}\n{line}\n')
        with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{reason}"):
            read_json_lines(file)


def test_packed_files_are_unpacked_within_bounds(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl.gz"
    monkeypatch.setattr("freemoe.evals.tasks.benchmark_files.MOST_JSON", 1000)
    file.write_bytes(gzip.compress(b'{"a": 1}\n' * 10))
    assert jsonl_gz_reader("a")(file) == [{"a": 1}] * 10
    file.write_bytes(gzip.compress(b"\n" * 10**7))
    with pytest.raises(DataError, match="unpacks to more than 1,000 bytes"):
        jsonl_gz_reader("a")(file)
    file.write_bytes(gzip.compress(b'{"a": 1}\n')[:-9])
    with pytest.raises(DataError, match="no gzipped JSONL"):
        jsonl_gz_reader("a")(file)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.parquet"])
@pytest.mark.parametrize(
    "data", [b"", b"\x00" * 100, b"\xff\xfe", b"[", b'"', b"a,a\n1,2\n", b"PAR1", b"null", b"5\n", b"[[1]]"]
)
def test_broken_files_of_rows(name, data, tmp_path):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    with contextlib.suppress(DataError):
        detect_shape(read_rows(str(tmp_path / name))[0])


def test_a_table_that_unpacks_to_more_than_memory(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 10**6] * 20}), tmp_path / "a.parquet")
    assert len(read_rows(str(tmp_path / "a.parquet"))) == 20
    monkeypatch.setattr(rows, "available_memory_bytes", lambda: 10**6)
    with pytest.raises(DataError, match=r"a\.parquet unpacks to"):
        read_rows(str(tmp_path / "a.parquet"))
