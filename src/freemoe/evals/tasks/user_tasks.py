"""A user's own task: JSONL of questions with choices, or of prompts with the one right continuation.

``{"question": ..., "choices": [...], "answer": ...}`` with the answer as index, letter or the choice's text,
or ``{"prompt": ..., "target": ...}``; either with an optional ``id``, ``field`` (sub-task) and ``key``
(content key).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.evals.tasks.documents import Document, content_key
from freemoe.evals.tasks.splits import carve, draw
from freemoe.evals.tasks.task import Response, grade_choice, likelihoods
from freemoe.text.files import read_json_lines

FORMATS = {
    "choice": ("question", "choices", "answer"),
    "target": ("prompt", "target"),
}
OPTIONAL = ("id", "field", "key")
FOLDER_FILES = ("reference.jsonl", "test.jsonl")


def _text(where: str, row: dict[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {name!r} is {value!r}; it must be text that is not blank.")
    return value


def answer_index(where: str, answer: object, choices: Sequence[str]) -> int:
    """Index of the right choice, from its index, its letter or its text.

    Raises:
        DataError: When it names no choice, or its letter and its text name different ones.
    """
    count = len(choices)
    letters = string.ascii_uppercase[:count]
    allowed = f"an index from 0 to {count - 1}, a letter from A to {letters[-1:]}, or the text of one choice"
    if isinstance(answer, int) and not isinstance(answer, bool):
        if 0 <= answer < count:
            return answer
        raise DataError(f"{where}: 'answer' is {answer}, but there are {count} choices; allowed: {allowed}.")
    if not isinstance(answer, str):
        raise DataError(f"{where}: 'answer' is {answer!r}; allowed: {allowed}.")
    found = {i for i, choice in enumerate(choices) if choice.strip() == answer.strip()}
    letter = answer.strip().upper()
    if len(letter) == 1 and letter in letters:
        found.add(letters.index(letter))
    if len(found) == 1:
        return found.pop()
    if found:
        raise DataError(
            f"{where}: 'answer' is {answer!r}, which is the letter of one choice and the text of another; "
            f"write the index (0 to {count - 1}) instead."
        )
    raise DataError(f"{where}: 'answer' is {answer!r}, which is none of the {count} choices; allowed: {allowed}.")


def _choice(where: str, row: dict[str, Any]) -> dict[str, Any]:
    question = _text(where, row, "question")
    choices = row["choices"]
    if not isinstance(choices, list) or not all(isinstance(c, str) and c.strip() for c in choices):
        raise DataError(f"{where}: 'choices' is {choices!r:.120}; it must be a list of texts that are not blank.")
    if len(choices) < 2:
        raise DataError(f"{where}: {len(choices)} choice(s); a question needs at least 2.")
    if len(set(choices)) < len(choices):
        twice = next(c for c in choices if choices.count(c) > 1)
        raise DataError(f"{where}: the choice {twice!r} stands there twice; choices must differ.")
    gold = answer_index(where, row["answer"], choices)
    answers = tuple(" " + c for c in choices)
    # The same fact asked again with other wrong choices is still the same fact.
    key = content_key(question, choices[gold])
    return {"prompt": question, "answers": answers, "gold": gold, "reference": answers[gold], "key": key}


def _target(where: str, row: dict[str, Any]) -> dict[str, Any]:
    prompt, target = _text(where, row, "prompt"), _text(where, row, "target")
    return {
        "prompt": prompt,
        "answers": (target,),
        "gold": 0,
        "reference": target,
        "key": content_key(prompt, target),
    }


def _format(where: str, row: Any) -> str:
    """Which of the two formats a row has."""
    wanted = " or ".join("{" + ", ".join(keys) + "}" for keys in FORMATS.values())
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__} ({row!r:.60}); each line must be an object {wanted}.")
    complete = [kind for kind, keys in FORMATS.items() if all(k in row for k in keys)]
    if len(complete) == 1:
        return complete[0]
    if complete:
        raise DataError(f"{where}: has the keys of both formats; use one: {wanted}.")
    nearest = max(FORMATS, key=lambda kind: sum(k in row for k in FORMATS[kind]))
    missing = [k for k in FORMATS[nearest] if k not in row]
    raise DataError(
        f"{where}: missing {', '.join(map(repr, missing))}; keys seen: "
        f"{', '.join(map(repr, sorted(row))) or 'none'}. Each line must be {wanted}; optional: "
        f"{', '.join(OPTIONAL)}."
    )


def read_task_file(path: Path, task: str) -> list[Document]:
    """Read a JSONL task; every line has the same of the two formats.

    Raises:
        DataError: With file, line number, the value seen and the values allowed.
    """
    documents: list[Document] = []
    seen: dict[str, int] = {}
    first: tuple[int, str] | None = None
    for number, row in read_json_lines(path):
        where = f"{path}:{number}"
        kind = _format(where, row)
        first = first or (number, kind)
        if kind != first[1]:
            raise DataError(
                f"{where}: a {kind!r} line in a file of {first[1]!r} lines (see line {first[0]}). One file "
                "holds one format; split it into two tasks."
            )
        parts = _choice(where, row) if kind == "choice" else _target(where, row)
        for name in OPTIONAL:
            value = row.get(name)
            if value is not None and not isinstance(value, str | int):
                raise DataError(f"{where}: {name!r} is {value!r:.60}; it must be text or a whole number.")
        if row.get("key") is not None:
            parts["key"] = content_key(str(row["key"]))
        name = str(row["id"]) if row.get("id") is not None else str(number)
        if name in seen:
            raise DataError(f"{where}: the id {name!r} was used on line {seen[name]} already; ids must differ.")
        seen[name] = number
        field = "" if row.get("field") is None else str(row["field"])
        identity = f"{path.stem}:{name}"
        documents.append(Document(task, identity, kind=kind, field=field, index=len(documents), **parts))  # type: ignore[arg-type]
    return documents


@dataclass
class UserTask:
    """A task from one JSONL file, carved in two by content key, or from two files.

    Args:
        name: Name within its domain.
        file: The file, or the reference file when ``test_file`` is given.
        test_file: The reported file.
        share: Share of the content keys that goes to the reference when one file is carved.
        limit: Documents of each split at most.
        seed: Seed of the carving and of the draw.
    """

    name: str
    file: Path
    test_file: Path | None = None
    share: float = 0.5
    limit: int | None = None
    seed: int = 0
    metric: str = "acc"
    runs_code: bool = False

    def __post_init__(self) -> None:
        first = read_task_file(self.file, self.name)
        if self.test_file is None:
            reference, reported = carve([d.key for d in first], self.share, self.seed)
            parts = [first[i] for i in reference], [first[i] for i in reported]
            how = f"carved from {self.file} by content key (share {self.share:g}, seed {self.seed})"
            if not all(parts):
                raise DataError(
                    f"Task {self.name!r}: {self.file} has {len({d.key for d in first})} distinct "
                    "document(s), too few to carve into reference and reported. Add documents or name two "
                    "files: REF.jsonl::TEST.jsonl."
                )
        else:
            second = read_task_file(self.test_file, self.name)
            if {d.kind for d in first} != {d.kind for d in second}:
                raise DataError(
                    f"Task {self.name!r}: {self.file} holds {first[0].kind!r} documents and {self.test_file} "
                    f"{second[0].kind!r} ones; both files need one format."
                )
            keys = {d.key for d in second}
            kept = [d for d in first if d.key not in keys]
            if not kept:
                raise DataError(
                    f"Task {self.name!r}: all {len(first)} documents of {self.file} also stand in "
                    f"{self.test_file}. What is searched on cannot be reported on; give it other documents."
                )
            parts = kept, second
            dropped = f", {len(first) - len(kept)} dropped as also reported" if len(kept) < len(first) else ""
            how = f"reference {self.file.name}{dropped}, reported {self.test_file.name}"
        # Two files may have one stem; the side keeps the names apart.
        marked = [
            [replace(d, id=f"{side}:{d.id}") for d in part]
            for side, part in zip(("reference", "reported"), parts, strict=True)
        ]
        self._reference, self._reported = (self._limited(part) for part in marked)
        self.note = (
            f"{self.name}: {how}; reference {len(self._reference)} of {len(parts[0])}, reported "
            f"{len(self._reported)} of {len(parts[1])}"
        )

    def _limited(self, documents: list[Document]) -> list[Document]:
        taken = draw([d.id for d in documents], [d.field for d in documents], self.limit, self.seed)
        return [documents[i] for i in taken]

    def reference(self) -> list[Document]:
        """Documents that may be searched on."""
        return list(self._reference)

    def reported(self) -> list[Document]:
        """Documents that are only reported on."""
        return list(self._reported)

    def grade(self, document: Document, responses: Sequence[Response]) -> dict[str, float]:
        """``acc`` (and ``acc_norm``) of a choice; for a target ``acc``: is it what greedy decoding gives."""
        if document.kind == "choice":
            return grade_choice(document, responses, [len(a) - 1 for a in document.answers])
        return {"acc": float(likelihoods(document, responses)[0][1])}
