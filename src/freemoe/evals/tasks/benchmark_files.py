"""Benchmark files as their authors published them, converted to the columns that lm-eval's YAML names."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.core.numbers import format_bytes
from freemoe.core.untrusted import MOST_JSON, parse_json, require_file
from freemoe.text.files import read_text_file
from freemoe.text.rows import read_rows

Row = dict[str, Any]
Reader = Callable[[Path], list[Row]]

LETTERS = "ABCDE"


def _require_columns(where: str, row: Any, columns: tuple[str, ...]) -> Row:
    missing = [c for c in columns if not isinstance(row, dict) or c not in row]
    if missing:
        raise DataError(
            f"{where}: missing {', '.join(map(repr, missing))}. This is not the benchmark's original file; columns needed: "
            f"{', '.join(columns)}."
        )
    return row


def rows_reader(*columns: str, make: Callable[[Row], Row] = lambda row: row) -> Reader:
    """Reader of JSONL, or of one JSON list, that has these columns; ``make`` makes those that are wanted of them."""
    return lambda path: [make(_require_columns(row.where, row.value, columns)) for row in read_rows(str(path))]


def jsonl_gz_reader(*columns: str) -> Reader:
    """A reader of gzipped JSON lines that have these columns."""

    def read_packed(path: Path) -> list[Row]:
        require_file(path)
        try:
            with gzip.open(path) as stream:
                raw = stream.read(MOST_JSON + 1)
            lines = raw.decode().split("\n")
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise DataError(f"{path} is no gzipped JSONL ({error}). Fetch the file again.") from None
        if len(raw) > MOST_JSON:
            raise DataError(
                f"{path} unpacks to more than {format_bytes(MOST_JSON)}: it is not the benchmark's original file."
            )
        places = ((line, f"{path}:{n}") for n, line in enumerate(lines, start=1) if line.strip())
        return [_require_columns(where, parse_json(line, where), columns) for line, where in places]

    return read_packed


def mmlu_csv(path: Path) -> list[Row]:
    """MMLU's headerless CSV: question, A, B, C, D, letter of the answer."""
    rows = []
    for number, cells in enumerate(csv.reader(io.StringIO(read_text_file(path))), start=1):
        if len(cells) != 6 or cells[5] not in LETTERS[:4]:
            raise DataError(
                f"{path}, row {number}: {len(cells)} cells, the last {cells[-1:]!r}; MMLU's files have "
                "question, A, B, C, D and the answer's letter, without a header."
            )
        rows.append({"question": cells[0], "choices": cells[1:5], "answer": LETTERS.index(cells[5])})
    return rows


def _arc_row(row: Row) -> Row:
    """The stem and the labelled choices lie inside ``question``."""
    asked = row["question"]
    choices = {part: [c[part] for c in asked["choices"]] for part in ("text", "label")}
    return {"id": row["id"], "question": asked["stem"], "choices": choices, "answerKey": row["answerKey"]}


arc_jsonl = rows_reader("id", "question", "answerKey", make=_arc_row)

hellaswag_jsonl = rows_reader(
    *("ind", "query", "endings", "label"),
    make=lambda r: {"ind": r["ind"], "query": r["query"], "choices": r["endings"], "label": r["label"]},
)
"""HellaSwag lines that are already cleaned: the query in one piece and its endings."""

boolq_jsonl = rows_reader(
    *("question", "passage", "label"),
    make=lambda r: {"question": r["question"], "passage": r["passage"], "label": int(r["label"])},
)
"""SuperGLUE's BoolQ: the label is true or false there, and a number in the data set that lm-eval reads."""


def openbookqa_tsv(path: Path) -> list[Row]:
    """OpenBookQA's TSV: the four choices in one cell, each after its letter in brackets."""
    table = list(csv.reader(io.StringIO(read_text_file(path)), delimiter="\t", quoting=csv.QUOTE_NONE))
    header = table[0]
    wanted = ("ID", "Question Stem", "Choices", "Answer Key")
    if any(name not in header for name in wanted):
        raise DataError(f"{path}: header {header}; OpenBookQA's has {', '.join(wanted)}.")
    at = [header.index(name) for name in wanted]
    rows = []
    for number, cells in enumerate(table[1:], start=2):
        name, stem, joined, answer = (cells[i] for i in at)
        labels, texts = _split_lettered_choices(joined)
        if labels != list(LETTERS[:4]) or answer not in labels:
            raise DataError(f"{path}:{number}: choices {labels}, answer {answer!r}; A to D and one of them are needed.")
        choices = {"text": texts, "label": labels}
        rows.append({"id": name, "question_stem": stem, "choices": choices, "answerKey": answer})
    return rows


def _split_lettered_choices(joined: str) -> tuple[list[str], list[str]]:
    """Letters and texts of choices in one cell; a letter that is not the next one is part of the text before it."""
    parts = re.split(r"(?:^|\s)\(([A-D])\)\s", joined)
    labels: list[str] = []
    texts: list[str] = []
    for label, text in zip(parts[1::2], parts[2::2], strict=True):
        if texts and label in labels:
            texts[-1] += f" ({label}) {text.strip()}"
        else:
            labels.append(label)
            texts.append(text.strip())
    return labels, texts


def piqa_jsonl(path: Path) -> list[Row]:
    """PIQA's goals with the labels that lie beside them, one a line, in ``NAME-labels.lst``."""
    rows = rows_reader("goal", "sol1", "sol2")(path)
    beside = path.with_name(f"{path.stem}-labels.lst")
    if not beside.is_file():
        raise DataError(f"{path}: its labels are not beside it; {beside.name} holds one 0 or 1 a line.")
    labels = read_text_file(beside).split()
    if len(labels) != len(rows) or not set(labels) <= {"0", "1"}:
        raise DataError(f"{beside}: {len(labels)} labels for {len(rows)} goals; one 0 or 1 a line is needed.")
    kept = ("goal", "sol1", "sol2")
    return [{**{k: r[k] for k in kept}, "label": int(n)} for r, n in zip(rows, labels, strict=True)]


def truthfulqa_json(path: Path) -> list[Row]:
    """TruthfulQA's two sets of choices: there answer -> 1 or 0, here two lists, what is true before what is not."""
    names = ("mc1_targets", "mc2_targets")
    rows = []
    for number, row in enumerate(rows_reader("question", *names)(path), start=1):
        made: Row = {"question": row["question"]}
        for name in names:
            pairs = sorted(row[name].items(), key=lambda pair: -pair[1])
            if not pairs or pairs[0][1] != 1 or (name == "mc1_targets" and sum(n for _, n in pairs) != 1):
                raise DataError(f"{path}, question {number}: {name} must mark true answers with 1, of mc1 just one.")
            made[name] = {"choices": [text for text, _ in pairs], "labels": [mark for _, mark in pairs]}
        rows.append(made)
    return rows


def math_folder(path: Path) -> list[Row]:
    """MATH: one JSON file a problem, in the order of their numbers; the answer stands in the solution's last box."""
    rows = []
    for file in sorted(path.glob("*.json"), key=lambda file: (len(file.stem), file.stem)):
        row = _require_columns(str(file), parse_json(read_text_file(file), str(file)), ("problem", "solution"))
        if "\\boxed" not in row["solution"] and "\\fbox" not in row["solution"]:
            raise DataError(f"{file}: its solution has no \\boxed answer, so nothing could be graded.")
        rows.append({"problem": row["problem"], "solution": row["solution"]})
    return rows
