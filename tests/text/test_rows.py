"""Rows of every container are the same rows; what cannot be read is named with its place."""

from pathlib import Path

import pytest

from freemoe.core.errors import DataError, RecipeError
from freemoe.text.documents import read_documents, read_items
from freemoe.text.rows import DataRow, is_rows, read_rows, source_name
from tests.rows import write_rows

DATA = Path(__file__).resolve().parents[1] / "data"


def items(name):
    shape, found = read_items(str(DATA / name), None)
    return shape.name, [item for _, item in found]


def test_tables_and_parquet_hold_the_same_questions():
    shape, parquet = items("choices.parquet")
    assert (shape, len(parquet)) == ("choice", 60)
    assert items("choices.csv") == (shape, parquet)
    assert items("lettered.tsv") == ("lettered", parquet)


def test_every_row_says_where_it_stands(tmp_path):
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.csv"
    lines.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    table.write_text('text,note\n"a\nb",1\nc,2\n')
    assert read_rows(str(lines), 1) == read_rows(str(lines))[:1]
    assert read_rows(str(lines))[1] == DataRow(3, f"{lines}:3", {"text": "b"})
    assert [row.value for row in read_rows(str(table))] == [{"text": "a\nb", "note": "1"}, {"text": "c", "note": "2"}]


def test_a_spreadsheet_with_semicolons(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt;target\n1,5 + 1 =;2,5\n")
    assert read_rows(str(path))[0].value == {"prompt": "1,5 + 1 =", "target": "2,5"}


BROKEN = {
    "cells": ("a.csv", "prompt,target\na,b,c\n", r"a.csv, row 2: 3 cells, and the first line names 2 columns \(prompt"),
    "header": ("a.csv", "prompt,prompt\na,b\n", "must name the columns, each once"),
    "quotes": ("a.csv", 'prompt,target\n"a"b,c\n', "no table that can be read"),
    "empty table": ("a.tsv", "prompt\ttarget\n", "holds no row"),
    "no list": ("a.json", '{"version": 1}', "a JSON dict; a list of rows"),
    "no parquet": ("a.parquet", "text", "no parquet file that can be read"),
    "another file": ("a.xlsx", "text", "no file of rows; those end in .jsonl"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(tmp_path, name):
    file, content, message = BROKEN[name]
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=message):
        read_rows(str(tmp_path / file))


def test_an_object_with_one_list_is_that_list(tmp_path):
    path = write_rows(tmp_path / "a.json", [{"version": 2, "data": [{"text": "a"}]}])
    assert read_rows(str(path))[0].value == {"text": "a"}


def test_a_data_set_is_read_by_split(tmp_path):
    """The same call as for the hub, on a folder of the library's own kind."""
    folder = tmp_path / "set"
    for split in ("train", "test"):
        write_rows(folder / f"{split}.jsonl", [{"prompt": f"{split} {i}", "target": "x"} for i in range(5)])
    found = read_rows(f"hf:{folder}:train[:3]")
    assert [row.value["prompt"] for row in found] == ["train 0", "train 1", "train 2"]
    assert found[2].where == f"hf:{folder}:train[:3], row 3"
    assert read_rows(f"hf:{folder}:train[:3]", 1) == found[:1]
    with pytest.raises(DataError, match="could not be read"):
        read_rows(f"hf:{folder}:validation")
    with pytest.raises(RecipeError, match="names no split"):
        read_rows("hf:owner/name")


def test_what_holds_rows_and_what_it_is_called():
    assert all(map(is_rows, ("a.csv", "b/c.PARQUET", "hf:a/b:train")))
    assert not any(map(is_rows, ("notes.txt", "notes")))
    assert [source_name(s) for s in ("x/law.csv", "hf:owner/law:main:train")] == ["law", "law"]


def test_documents_of_any_shape_are_text(tmp_path):
    asked = "first add 5 and after that reduce modulo 11: f(x)="
    assert read_documents(DATA / "completions.jsonl")[0] == f"{asked}((x+5)%11)"
    assert read_documents(DATA / "instructions.jsonl")[0] == f"Task: Write f.\n\n{asked}\n\nAnswer: ((x+5)%11)"
    chat = read_documents(DATA / "messages.jsonl")[0]
    assert chat == f"System: Write the function.\n\nUser: {asked}\n\nAssistant: ((x+5)%11)"
    assert read_documents(DATA / "choices.csv")[0] == "Q: which river is Zakoford on?\nA: Amber"
    assert read_documents(f"text:{DATA / 'texts.jsonl'}") == read_documents(DATA / "texts.jsonl")
    with pytest.raises(DataError, match=r"asked for as 'chat', which needs {messages}; seen: 'text'"):
        read_documents(f"chat:{DATA / 'texts.jsonl'}")
    with pytest.raises(DataError, match="'chat' needs rows"):
        read_documents(f"chat:{DATA / 'notes.txt'}")
