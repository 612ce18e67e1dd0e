"""Rows of data as people have them: JSONL, JSON, CSV, TSV, parquet, or a split of a data set (``hf:owner/name:split``)."""

from __future__ import annotations

import csv
import importlib.util
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError, RecipeError
from freemoe.core.memory import available_memory_bytes
from freemoe.core.numbers import format_bytes
from freemoe.core.untrusted import parse_json, require_file
from freemoe.text.files import evenly_spaced, read_json_lines, read_text_file
from freemoe.text.hub_data import load_hub_data

HUB = "hf:"
"""How the name of a data set begins that the `datasets` library is asked for: on the hub, or a folder of its own."""

MOST_ROWS = 100_000  # Rows that are taken of a data set at most, evenly spaced; it may have hundreds of millions
MOST_CHOICES = 1000  # Of a question; every one of them is scored
MOST_MESSAGES = 500  # Of a conversation; every answer is scored behind all that stands before it

TABLES = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", ".json", ".parquet", *TABLES)  # Of files that hold rows; every other file is plain text

_HUB_NAME = re.compile(r"hf:(?P<name>[^:]+)(?::(?P<config>[^:\[\]]+))?:(?P<split>[^:\[\]]+(?:\[[^\]]*\])?)")


@dataclass(frozen=True)
class DataRow:
    """One row of a source."""

    number: int  # Its line or row, counted from 1
    where: str  # Source and number, for messages
    value: Any  # What it holds: of tables a dict by column


def is_rows(source: str) -> bool:
    """Whether a source holds rows rather than plain text, by its name."""
    return source.startswith(HUB) or Path(source).suffix.lower() in SUFFIXES


def source_name(source: str) -> str:
    """What a source is called: the stem of a file, or the name of a data set."""
    if source.startswith(HUB):
        return Path(source.removeprefix(HUB).split(":")[0]).name
    return Path(source).stem


def read_rows(source: str, most: int | None = None) -> list[DataRow]:
    """Read every row of a source, or its first ones.

    ``source``: path of a ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` file, or
    ``hf:owner/name[:config]:split``. ``most``: rows at most; of a data set no others are made.

    Raises:
        DataError: With file and line, when it is absent, empty or cannot be read.
        RecipeError: A data set's name without a split.
    """
    if source.startswith(HUB):
        return _from_datasets(source, most)
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        rows = [DataRow(number, f"{path}:{number}", value) for number, value in read_json_lines(path)]
    elif suffix == ".json":
        rows = _from_json(path)
    elif suffix == ".parquet":
        rows = _number_rows(str(path), _from_parquet(path))
    elif suffix in TABLES:
        rows = _from_table(path, TABLES[suffix])
    else:
        raise DataError(f"{path} is no file of rows; those end in {', '.join(SUFFIXES)}.")
    if not rows:
        raise DataError(f"{path} holds no row. Give it at least one.")
    return rows[:most]


def _number_rows(source: str, values: Sequence[Any]) -> list[DataRow]:
    return [DataRow(number, f"{source}, row {number}", value) for number, value in enumerate(values, start=1)]


def _from_json(path: Path) -> list[DataRow]:
    """A list, or an object that holds one list of them: ``{"data": [...]}``."""
    value = parse_json(read_text_file(path), str(path))
    if isinstance(value, dict):
        lists = [held for held in value.values() if isinstance(held, list) and held and isinstance(held[0], dict)]
        if len(lists) == 1:
            value = lists[0]
    if not isinstance(value, list):
        raise DataError(f"{path} holds a JSON {type(value).__name__}; a list of rows or of texts is needed.")
    return _number_rows(str(path), value)


def _from_table(path: Path, delimiter: str) -> list[DataRow]:
    text = read_text_file(path)
    first = text.split("\n", 1)[0]
    if delimiter == "," and first.count(";") > first.count(","):
        delimiter = ";"  # what spreadsheets write where the comma stands in numbers
    try:
        lines = [cells for cells in csv.reader(io.StringIO(text), delimiter=delimiter, strict=True) if any(cells)]
    except csv.Error as error:
        raise DataError(f"{path} is no table that can be read: {error}. Check its quotes.") from None
    header = [name.strip() for name in lines[0]]
    if len(set(header)) < len(header) or not all(header):
        raise DataError(f"{path}: the first line must name the columns, each once; it is {header!r:.120}.")
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        if len(cells) != len(header):
            raise DataError(
                f"{path}, row {number}: {len(cells)} cells, and the first line names {len(header)} columns "
                f"({', '.join(header)}). Quote cells that hold {delimiter!r}."
            )
        rows.append(DataRow(number, f"{path}, row {number}", dict(zip(header, cells, strict=True))))
    return rows


def _from_parquet(path: Path) -> list[Any]:
    require_file(path)
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"{path} needs pyarrow, which is not installed here. pip install 'freemoe[eval]'.")
    import pyarrow
    import pyarrow.parquet

    room, size, found = available_memory_bytes() // 2, 0, []
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                # A file packs values that repeat into next to nothing; a row is a few hundred bytes in Python at least.
                size += batch.nbytes + 256 * batch.num_rows
                if size > room:
                    raise DataError(
                        f"{path} unpacks to {format_bytes(size)} or more, and half of the free memory is {format_bytes(room)}. Divide it."
                    )
                found += batch.to_pylist()
        return found
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is no parquet file that can be read ({error}). Write it again.") from None


def _from_datasets(source: str, most: int | None) -> list[DataRow]:
    found = _HUB_NAME.fullmatch(source)
    if found is None:
        raise RecipeError(
            f"{source!r} names no split of a data set. Write hf:owner/name:split or hf:owner/name:config:split, for instance "
            "hf:owner/name:train, or hf:owner/name:train[:2000] for its first rows."
        )
    table = load_hub_data(*found.group("name", "config", "split"))
    taken = evenly_spaced(len(table), MOST_ROWS)[:most]
    if not taken:
        raise DataError(f"The data set {source!r} has no row.")
    return [DataRow(i + 1, f"{source}, row {i + 1}", dict(table[i])) for i in taken]
