"""What a row of data says: a question with choices, a prompt with its target, an instruction, a conversation, or text.

A shape is a row of the table below: the columns by which it is recognised, and how it is read. The first row of a source
decides the shape of all; a user may name it instead (``chat:FILE``).
"""

from __future__ import annotations

import ast
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from freemoe.core.errors import DataError
from freemoe.core.untrusted import parse_json
from freemoe.text.chat import Message, plain_prompt
from freemoe.text.rows import MOST_CHOICES, MOST_MESSAGES, DataRow

_LONGEST_LISTED, _MOST_KEYS = 1 << 20, 40

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}
"""Roles of messages as data sets write them -> as templates know them."""


@dataclass(frozen=True)
class ChoiceItem:
    """A question with choices; ``gold`` is the right one's place."""

    question: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class TargetItem:
    """A prompt with the one right continuation."""

    prompt: str
    target: str


@dataclass(frozen=True)
class ChatTurn:
    """A response and what comes before it."""

    messages: tuple[Message, ...]  # The conversation before the response
    response: str  # What the assistant says
    prompt: str  # The conversation as plain text, where no template is used
    gap: str = " "  # What stands between plain prompt and response


@dataclass(frozen=True)
class ConversationItem:
    """Every turn of a row in which an assistant answers."""

    turns: tuple[ChatTurn, ...]


@dataclass(frozen=True)
class TextItem:
    """An item of plain text, without a question."""

    text: str


Item = ChoiceItem | TargetItem | ConversationItem | TextItem


@dataclass(frozen=True)
class RowShape:
    """One row of the table."""

    name: str  # As it is forced: ``NAME:FILE``
    columns: tuple[tuple[str, ...], ...]  # What it needs, each with the names it may have
    read: Callable[[str, dict[str, Any]], Item]  # Makes an item of a row; is told where it stands
    beats: tuple[str, ...] = ()  # Shapes whose columns may stand beside its own, and which it is taken before
    optional: tuple[str, ...] = ()  # Further columns that its rows have, beside those that it needs

    def matches_row(self, row: dict[str, Any]) -> bool:
        """Whether a row has all that it needs."""
        return not self.missing_columns(row)

    def missing_columns(self, row: dict[str, Any]) -> list[str]:
        """What a row lacks, by its first name."""
        return [names[0] for names in self.columns if not any(name in row for name in names)]

    def columns_text(self) -> str:
        """Its columns: ``{question, choices, answer}``."""
        *first, last = [names[0] for names in self.columns]
        return "{" + ", ".join([*first, *self.optional, last]) + "}"

    def of_row(self, row: DataRow) -> RowShape:
        """The same with the optional columns that a row has, for `describe`."""
        has = row.value if isinstance(row.value, dict) else {}
        return replace(self, optional=tuple(name for name in _OPTIONAL.get(self.name, ()) if name in has))


def _find_column(row: dict[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """The first of several columns that a row has, and what it holds."""
    name = next(n for n in names if n in row)
    return name, row[name]


def _text_column(where: str, row: dict[str, Any], names: Sequence[str]) -> str:
    name, value = _find_column(row, names)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {name!r} is {value!r:.120}; it must be text that is not blank.")
    return value


def answer_index(where: str, answer: object, choices: Sequence[str], labels: Sequence[str] = ()) -> int:
    """Index of the right choice, from its index, its label, its letter or its text.

    ``labels``: what the data calls them; letters from A on if absent.

    Raises:
        DataError: When it names no choice, or its letter and its text name different ones.
    """
    count = len(choices)
    letters = list(labels) or list(string.ascii_uppercase[:count])
    allowed = f"an index from 0 to {count - 1}, a letter from {letters[0]} to {letters[-1]}, or the text of one choice"
    if isinstance(answer, int) and not isinstance(answer, bool):
        if 0 <= answer < count:
            return answer
        raise DataError(f"{where}: 'answer' is {answer!s:.40}, but there are {count} choices; allowed: {allowed}.")
    if not isinstance(answer, str):
        raise DataError(f"{where}: 'answer' is {answer!r:.120}; allowed: {allowed}.")
    found = {i for i, choice in enumerate(choices) if choice.strip() == answer.strip()}
    letter = answer.strip().upper()
    if letter in letters:
        found.add(letters.index(letter))
    if len(found) == 1:
        return found.pop()
    if found:
        raise DataError(
            f"{where}: 'answer' is {answer!r:.120}, which is the letter of one choice and the text of another; "
            f"write the index (0 to {count - 1}) instead."
        )
    if letter.isdecimal() and len(letter) < 10 and int(letter) < count:  # a cell of a table is always text
        return int(letter)
    raise DataError(f"{where}: 'answer' is {answer!r:.120}, which is none of the {count} choices; allowed: {allowed}.")


def _parse_list_cell(value: Any) -> Any:
    """A list that a table's cell holds as text, as JSON or as Python writes it."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    if len(value) > _LONGEST_LISTED:
        return value
    for read in (partial(parse_json, where="a cell"), ast.literal_eval):
        try:
            return read(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return value


def _read_choice(where: str, row: dict[str, Any]) -> ChoiceItem:
    name, choices = _find_column(row, CHOICES)
    choices, labels = _parse_list_cell(choices), ()
    if isinstance(choices, dict) and {"text", "label"} <= choices.keys():  # as ARC and its kin have it on the hub
        choices, labels = choices["text"], choices["label"]
        if not isinstance(choices, list) or not isinstance(labels, list) or len(choices) != len(labels):
            raise DataError(f"{where}: {name!r} must have a label for every text; it is {row[name]!r:.120}.")
        labels = tuple(map(str, labels))
    if not isinstance(choices, list) or not all(isinstance(c, str) and c.strip() for c in choices):
        raise DataError(f"{where}: {name!r} is {choices!r:.120}; it must be a list of texts that are not blank.")
    return _check_choice(where, row, choices, labels)


def _check_choice(where: str, row: dict[str, Any], choices: list[str], labels: Sequence[str]) -> ChoiceItem:
    question = _text_column(where, row, QUESTION)
    if len(choices) > MOST_CHOICES:
        raise DataError(
            f"{where}: {len(choices):,} choices; a question has at most {MOST_CHOICES:,}. Ask for the answer as text instead: "
            "prompt and target."
        )
    if len(choices) < 2:
        raise DataError(f"{where}: {len(choices)} choice(s); a question needs at least 2.")
    if len(set(choices)) < len(choices):
        twice = next(c for c in choices if choices.count(c) > 1)
        raise DataError(f"{where}: the choice {twice!r:.120} stands there twice; choices must differ.")
    _, answer = _find_column(row, ANSWER)
    return ChoiceItem(question, tuple(choices), answer_index(where, answer, choices, labels))


def _read_lettered(where: str, row: dict[str, Any]) -> ChoiceItem:
    """A column for every choice, A, B, C ..., as tables have it."""
    choices = []
    for letter in string.ascii_uppercase:
        if row.get(letter) in (None, ""):
            break
        choices.append(_text_column(where, row, (letter,)))
    return _check_choice(where, row, choices, ())


def _read_completion(where: str, row: dict[str, Any]) -> ConversationItem:
    name, prompt = _find_column(row, PROMPT)
    if isinstance(prompt, list):  # both sides as messages
        _, answer = _find_column(row, COMPLETION)
        return _parse_messages(where, name, [*prompt, *(answer if isinstance(answer, list) else [answer])])
    asked, told = _text_column(where, row, PROMPT), _text_column(where, row, COMPLETION)
    return ConversationItem((ChatTurn(({"role": "user", "content": asked},), told, asked, ""),))


def _read_instruction(where: str, row: dict[str, Any]) -> ConversationItem:
    asked, told = _text_column(where, row, ("instruction",)).strip(), _text_column(where, row, OUTPUT).strip()
    given = (row.get("input") or "").strip() if isinstance(row.get("input") or "", str) else ""
    content = "\n\n".join(part for part in (asked, given) if part)
    prompt = "\n\n".join(part for part in (f"Task: {asked}", given, "Answer:") if part)
    return ConversationItem((ChatTurn(({"role": "user", "content": content},), told, prompt),))


def _read_chat(where: str, row: dict[str, Any]) -> ConversationItem:
    name, messages = _find_column(row, MESSAGES)
    messages = _parse_list_cell(messages)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: {name!r} is {messages!r:.120}; it must be a list of messages.")
    return _parse_messages(where, name, messages)


def _parse_messages(where: str, name: str, messages: Sequence[Any]) -> ConversationItem:
    found: list[Message] = []
    turns = []
    if len(messages) > MOST_MESSAGES:
        raise DataError(
            f"{where}: {len(messages):,} messages; a conversation has at most {MOST_MESSAGES:,}. Cut it into several rows."
        )
    for number, message in enumerate(messages, start=1):
        read = _parse_message(f"{where}, {name} {number}", message)
        if read["role"] == "assistant" and any(m["role"] == "user" for m in found):
            turns.append(ChatTurn(tuple(found), read["content"], plain_prompt(found)))
        found.append(read)
    if not turns:
        roles = ", ".join(m["role"] for m in found)
        raise DataError(f"{where}: nobody answers a user here (roles: {roles}). Leave the row out.")
    return ConversationItem(tuple(turns))


def _parse_message(where: str, message: Any) -> Message:
    if not isinstance(message, dict) or not ({"role", "from"} & message.keys()):
        raise DataError(f"{where} is {message!r:.80}; a message is an object with 'role' and 'content'.")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{where}: the role {role!r:.80} is unknown; allowed: {', '.join(ROLES)}.")
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        if any(not isinstance(p, str) for p in parts):
            raise DataError(f"{where}: its content holds more than text, and only text is read. Leave the row out.")
        content = "".join(p for p in parts if p)
    if not isinstance(content, str):
        raise DataError(
            f"{where}: its content is {content!r:.60}; it must be text. Leave rows with calls of tools out."
        )
    return {"role": ROLES[role], "content": content}


QUESTION, ANSWER = ("question", "prompt"), ("answer", "answerKey", "label", "gold")
CHOICES = ("choices", "options")
PROMPT, COMPLETION = ("prompt", "question", "input"), ("completion", "response", "answer", "output")
OUTPUT = ("output", "response")
MESSAGES, TEXT = ("messages", "conversations"), ("text",)

SHAPES: dict[str, RowShape] = {
    shape.name: shape
    for shape in (
        RowShape(
            "chat", (MESSAGES,), _read_chat, beats=("completion", "target", "text", "instruction", "choice", "lettered")
        ),
        RowShape("choice", (("question",), CHOICES, ANSWER), _read_choice, beats=("text", "lettered")),
        RowShape("lettered", (("question",), ("A",), ("B",), ANSWER), _read_lettered, beats=("text",)),
        RowShape(
            "target",
            (("prompt",), ("target",)),
            lambda where, row: TargetItem(*(_text_column(where, row, (name,)) for name in ("prompt", "target"))),
            beats=("text",),
        ),
        RowShape("completion", (("prompt",), ("completion", "response")), _read_completion, beats=("text",)),
        RowShape("instruction", (("instruction",), OUTPUT), _read_instruction, beats=("completion", "text")),
        RowShape("text", (TEXT,), lambda where, row: TextItem(_text_column(where, row, TEXT))),
    )
}
"""In the order in which they are told."""

_OPTIONAL = {"lettered": tuple(string.ascii_uppercase[2:]), "instruction": ("input",)}

_LOOSE = {"completion": (PROMPT, COMPLETION), "choice": (QUESTION, CHOICES, ANSWER)}
"""Further names that columns may have where the shape is forced."""


def shape_by_name(name: str) -> RowShape:
    """The shape of a name that was asked for."""
    return replace(SHAPES[name], columns=_LOOSE.get(name, SHAPES[name].columns))


def detect_shape(row: DataRow) -> RowShape:
    """The shape of a source, from its first row.

    Raises:
        DataError: With what it has, what is wanted and the way out, when it has no shape or more than one.
    """
    value = _as_dict(row)
    wanted = " or ".join(shape.columns_text() for shape in SHAPES.values())
    found = [shape for shape in SHAPES.values() if shape.matches_row(value)]
    found = [s for s in found if not any(s.name in other.beats for other in found)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(f"{s.name!r} {s.columns_text()}" for s in found)
        raise DataError(
            f"{row.where}: has the keys of both formats, {names}. Say which is meant: {found[0].name}:FILE or "
            f"{found[1].name}:FILE."
        )
    # A tie goes to the shape that lacks least.
    nearest = min(SHAPES.values(), key=lambda s: (len(s.missing_columns(value)) / len(s.columns), len(s.columns)))
    asks = [s for s in _LOOSE if shape_by_name(s).matches_row(value)]
    hint = f" If it is meant as {asks[0]!r}, write {asks[0]}:FILE." if asks else ""
    lacks = nearest.missing_columns(value)
    said = f"missing {', '.join(map(repr, lacks))}" if len(lacks) < len(nearest.columns) else "no known key"
    raise DataError(f"{row.where}: {said}; keys seen: {keys_text(value)}. Each row must be {wanted}.{hint}")


def read_item(row: DataRow, shape: RowShape, first: DataRow) -> Item:
    """What a row says.

    Raises:
        DataError: With where it stands, the value seen and the values allowed.
    """
    value = _as_dict(row)
    missing = shape.missing_columns(value)
    if missing:
        others = [s for s in SHAPES.values() if s.name != shape.name and s.matches_row(value)]
        if others:
            raise DataError(
                f"{row.where}: a {others[0].name!r} line in a file of {shape.name!r} lines (see {first.where}). One file "
                "holds one format; split it into two tasks."
            )
        raise DataError(
            f"{row.where}: missing {', '.join(map(repr, missing))}; keys seen: "
            f"{keys_text(value)}. Each row must be {shape.columns_text()}, as {first.where} is."
        )
    return shape.read(row.where, value)


def keys_text(row: dict[str, Any]) -> str:
    """The names of a row's columns, the first of them where they are many."""
    names = sorted(row)
    shown = ", ".join(f"{name!r:.80}" for name in names[:_MOST_KEYS])
    return f"{shown} and {len(names) - _MOST_KEYS:,} more" if len(names) > _MOST_KEYS else shown or "none"


def _as_dict(row: DataRow) -> dict[str, Any]:
    if isinstance(row.value, str):
        return {"text": row.value}
    if not isinstance(row.value, dict):
        wanted = " or ".join(shape.columns_text() for shape in SHAPES.values())
        raise DataError(
            f"{row.where}: a JSON {type(row.value).__name__} ({row.value!r:.60}); each line must be an object {wanted}."
        )
    return row.value
