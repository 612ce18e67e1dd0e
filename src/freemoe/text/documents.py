"""The documents of a source as plain text, whatever shape its rows have: what conversions, trims and texts are read from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.text.chat import as_prompt, uses_template
from freemoe.text.files import read_text_file
from freemoe.text.groups import TextPassage
from freemoe.text.rows import HUB, DataRow, is_rows, read_rows
from freemoe.text.shapes import (
    SHAPES,
    ChoiceItem,
    ConversationItem,
    Item,
    RowShape,
    TargetItem,
    TextItem,
    detect_shape,
    keys_text,
    read_item,
    shape_by_name,
)

log = logging.getLogger(__name__)


def split_shape(source: str) -> tuple[str | None, str]:
    """Part ``chat:FILE`` into the shape that it asks for, or None, and the source."""
    name, colon, rest = source.partition(":")
    return (name, rest) if colon and name in SHAPES else (None, source)


def read_items(source: str, wanted: str | None) -> tuple[RowShape, list[tuple[DataRow, Item]]]:
    """Every row of a source and what it says.

    ``wanted``: name of the shape; recognised by the first row if None.

    Raises:
        DataError: With where it stands, the value seen and the values allowed.
    """
    rows = read_rows(source)
    shape = detect_shape(rows[0]) if wanted is None else shape_by_name(wanted)
    value = rows[0].value
    if wanted not in (None, "text") and (not isinstance(value, dict) or not shape.matches_row(value)):
        keys = keys_text(value) if isinstance(value, dict) else type(value).__name__
        raise DataError(f"{rows[0].where}: asked for as {wanted!r}, which needs {shape.columns_text()}; seen: {keys}.")
    return shape.of_row(rows[0]), [(row, read_item(row, shape, rows[0])) for row in rows]


def user_messages(item: ConversationItem) -> list[str]:
    """What the user says in a conversation."""
    return [message["content"] for message in item.turns[-1].messages if message["role"] == "user"]


def item_question(item: Item) -> tuple[str, ...]:
    """The question of a row, and its right answer where another one would make it another question; nothing for text."""
    match item:
        case ChoiceItem(question, choices, gold):  # asked again with other wrong choices it is still the same
            return question, choices[gold]
        case TargetItem(prompt, target):
            return prompt, target
        case ConversationItem():
            return ("\n".join(user_messages(item)),)
        case TextItem():
            return ()


def key_of(row: DataRow, group_by: str | None) -> str | None:
    """What a row says that it is about, or comes from: its ``key``, or another column.

    Raises:
        DataError: Neither text nor a whole number, or nothing in the column that was asked for.
    """
    name = group_by or "key"
    value = row.value.get(name) if isinstance(row.value, dict) else None
    if group_by and value in (None, ""):
        keys = keys_text(row.value) if isinstance(row.value, dict) else type(row.value).__name__
        raise DataError(
            f"{row.where}: nothing in {group_by!r}, by which rows are to be grouped (--group-by); keys seen: {keys}. Fill it in "
            "every row, name another column, or leave --group-by out."
        )
    if value is not None and not isinstance(value, str | int):
        raise DataError(f"{row.where}: {name!r} is {value!r:.60}; it must be text or a whole number.")
    return None if value is None else str(value)


def read_documents(
    source: str | Path, tokenizer: Any = None, chat: str = "off", group_by: str | None = None
) -> list[str]:
    """The documents of a source: one for a file of plain text, else one per row.

    ``source``: A file, a data set (``hf:owner/name:split``), or either after a shape's name (``chat:FILE``). ``chat``: as
    of `chat.uses_template`. ``group_by``: column of rows that names their groups; ``key`` if absent.

    Raises:
        DataError: When it is absent, empty or cannot be read, with file and line.
    """
    wanted, where = split_shape(str(source))
    if not is_rows(where):
        if wanted not in (None, "text"):
            raise DataError(
                f"{source}: {wanted!r} needs rows (.jsonl, .json, .csv, .tsv, .parquet or {HUB}NAME:SPLIT)."
            )
        return [read_text_file(Path(where).expanduser())]
    shape, items = read_items(where, wanted)
    template = tokenizer is not None and uses_template(tokenizer, chat, shape.name == "chat")
    if shape.name != "text":
        log.info(
            "%s: read as %s %s%s", where, shape.name, shape.columns_text(), ", by the chat template" if template else ""
        )
    return [
        TextPassage(
            _document_text(row, item, tokenizer if template else None), item_question(item), key_of(row, group_by) or ""
        )
        for row, item in items
    ]


def _document_text(row: DataRow, item: Item, template: Any) -> str:
    match item:
        case ConversationItem(turns):
            last = turns[-1]
            if template is None:
                return last.prompt + last.gap + last.response
            said = [*last.messages, {"role": "assistant", "content": last.response}]
            return as_prompt(template, said, row.where, whole=True)
        case ChoiceItem(question, choices, gold):
            return f"{question} {choices[gold]}"
        case TargetItem(prompt, target):
            return prompt + target
        case TextItem(text):
            return text
