"""A user's own task: rows of questions with choices, of prompts with their target, of instructions or conversations.

The shape of the rows is recognised (`freemoe.text.shapes`) or named: ``chat:FILE``. A row of any shape may have an ``id``, a
``field`` (sub-task) and a ``key`` (content key).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.evals.sandbox.runner import PASS_AT, passed_at
from freemoe.evals.tasks.documents import Document, content_key, join_copies
from freemoe.evals.tasks.splits import carve_by_key, draw_balanced, large_group_text
from freemoe.evals.tasks.task import EvalTask, grade_choice
from freemoe.recipes import DataSection
from freemoe.text.chat import as_turn, uses_template
from freemoe.text.documents import item_question, key_of, read_items, user_messages
from freemoe.text.rows import HUB, DataRow, source_name
from freemoe.text.shapes import ChoiceItem, ConversationItem, Item, RowShape, TargetItem

OPTIONAL = ("id", "field")
LONGEST_NAME = 400  # Characters of what names a row or its sub-task
SHARE = 0.5  # Of the content keys, those that go to the reference when one source is carved

FOLDER_FILES = ("reference.jsonl", "test.jsonl")

MOST_SCORED, MOST_TOKENS = 512, 2048
"""Tokens of a response that are scored, its first, and tokens of a document, cut from the prompt's left; less where the tokenizer
says that the model holds less."""


def read_task_file(
    source: str | Path, task: str, data: DataSection | None = None, tokenizer: Any = None, wanted: str | None = None
) -> tuple[RowShape, list[Document]]:
    """Read the documents of a source; all its rows have one shape.

    ``data``: whether the chat template is used, and which column names what rows come from (``key`` if None).
    ``tokenizer``: of the model; responses are cut into its tokens. Gives the shape, and the documents.

    Raises:
        DataError: With file, line number, the value seen and the values allowed.
    """
    data = data or DataSection()
    shape, items = read_items(str(source), wanted)
    template = uses_template(tokenizer, data.chat, shape.name == "chat")
    documents: list[Document] = []
    seen: dict[str, int] = {}
    for row, item in items:
        own = row.value if isinstance(row.value, dict) else {}
        for name in OPTIONAL:
            value = own.get(name)
            if value is not None and not isinstance(value, str | int):
                raise DataError(f"{row.where}: {name!r} is {value!r:.60}; it must be text or a whole number.")
            if len(str(value)) > LONGEST_NAME:
                raise DataError(
                    f"{row.where}: {name!r} has {len(str(value)):,} characters; at most {LONGEST_NAME} are allowed."
                )
        # Data sets of conversations repeat theirs.
        named = own.get("id") is not None and not isinstance(item, ConversationItem)
        name = str(own["id"]) if named else str(row.number)
        if name in seen:
            raise DataError(f"{row.where}: the id {name!r:.80} was used on line {seen[name]} already; ids must differ.")
        seen[name] = row.number
        field = "" if own.get("field") is None else str(own["field"])
        what = user_messages(item) if isinstance(item, ConversationItem) else item_question(item)
        source_key = key_of(row, data.group_by)
        key = content_key(*(what if source_key is None else [source_key]))
        for number, parts in enumerate(_document_fields(row, item, tokenizer, template)):
            turn = f".{number + 1}" if isinstance(item, ConversationItem) and len(item.turns) > 1 else ""
            identity = f"{source_name(str(source))}:{name}{turn}"
            documents.append(
                Document(task, identity, key, field=field, index=len(documents), about=item_question(item), **parts)
            )
    return shape, join_copies(documents)


def _document_fields(row: DataRow, item: Item, tokenizer: Any, template: bool) -> Iterator[dict[str, Any]]:
    """The fields of the documents of one row."""
    match item:
        case ChoiceItem(question, choices, gold):
            answers = tuple(" " + c for c in choices)
            yield {"kind": "choice", "prompt": question, "answers": answers, "gold": gold, "reference": answers[gold]}
        case TargetItem(prompt, target):
            yield {"kind": "target", "prompt": prompt, "answers": (target,), "gold": 0, "reference": target}
        case ConversationItem():
            yield from response_parts(row.where, item, tokenizer, template)
        case _:
            raise DataError(f"{row.where}: this is plain text; write text:FILE.")


def response_parts(where: str, item: ConversationItem, tokenizer: Any, template: bool) -> Iterator[dict[str, Any]]:
    """The fields of a document for every turn in which the assistant answers: scored after what comes before it, token by token.

    Raises:
        DataError: The template refuses the messages, or a response has no token.
    """
    if tokenizer is None:
        raise DataError(
            f"{where}: responses are scored token by token, and no tokenizer was given; pass the model's: "
            "load_domain(..., tokenizer=tokenizer)."
        )
    for turn in item.turns:
        prompt, response = turn.prompt, turn.gap + turn.response
        if template:
            prompt, response = as_turn(tokenizer, turn.messages, turn.response, where)
        ids, given = _encode_response(tokenizer, prompt, response, template)
        if len(ids) == given:
            raise DataError(f"{where}: the response {response!r:.60} has no token of its own. Leave the row out.")
        said = {"prompt": prompt, "answers": (response,), "reference": response}
        yield {"kind": "text", **said, "tokens": ids, "given": given}


def _encode_response(tokenizer: Any, prompt: str, response: str, template: bool) -> tuple[tuple[int, ...], int]:
    """Token ids of prompt and response, and how many are the prompt's; both cut to what is scored."""
    longest = tokenizer.model_max_length if 0 < tokenizer.model_max_length < 10**9 else MOST_TOKENS
    # A template writes its own tokens at the start; elsewhere the tokenizer's stand there, as before every prompt.
    head = tokenizer.encode(prompt, add_special_tokens=not template, verbose=False)
    if not head:  # the first token of a text that has nothing before it cannot be predicted
        head = [t for t in (tokenizer.bos_token_id, tokenizer.eos_token_id) if t is not None][:1]
    tail = tokenizer.encode(response, add_special_tokens=False, verbose=False)
    tail = tail[: min(MOST_SCORED, longest // 2)]
    head = head[-(min(MOST_TOKENS, longest) - len(tail)) :]
    return (*head, *tail), len(head)


@dataclass
class UserTask(EvalTask):
    """A task from one source, carved in two by content key, or from two.

    ``file``: the file or data set, or the one of the reference when ``test_file`` is given. ``data``: how many documents
    each split has at most, and how rows become documents (`read_task_file`). ``tokenizer``: of the model.
    """

    name: str
    file: str | Path
    test_file: str | Path | None = None
    data: DataSection = field(default_factory=DataSection)
    tokenizer: Any = None
    seed: int = 0
    shape: str | None = None

    def __post_init__(self) -> None:
        shape, first = read_task_file(self.file, self.name, self.data, self.tokenizer, self.shape)
        self.metric = "nll" if first[0].kind == "text" else "acc"
        template = uses_template(self.tokenizer, self.data.chat, shape.name == "chat")
        self.chat = template and self.metric == "nll"
        if self.test_file is None:
            reference, reported = carve_by_key([d.key for d in first], SHARE, self.seed)
            parts = [first[i] for i in reference], [first[i] for i in reported]
            how = f"carved from {self.file} by content key (share {SHARE:g}, seed {self.seed})"
            if not all(parts):
                raise DataError(
                    f"Task {self.name!r}: {self.file} has {len({d.key for d in first})} distinct "
                    "document(s), too few to carve into reference and reported. Add documents or name two "
                    "files: REF.jsonl::TEST.jsonl."
                )
        else:
            parts, dropped = self._two_sources(first)
            how = f"reference {_source_label(self.file)}{dropped}, reported {_source_label(self.test_file)}"
        # Two files may have one stem; the side keeps the names apart.
        marked = [
            [replace(d, id=f"{side}:{d.id}") for d in part]
            for side, part in zip(("reference", "reported"), parts, strict=True)
        ]
        self._reference, self._reported = (
            [part[i] for i in draw_balanced([d.id for d in part], [d.field for d in part], self.data.limit, self.seed)]
            for part in marked
        )
        put = "by the model's chat template" if self.chat else "as plain text, without a chat template"
        read_as = f"{shape.name} {shape.columns_text()}" + (f", {put}" if self.metric == "nll" else "")
        self.note = (
            f"{self.name}: read as {read_as}; {how}; reference {len(self._reference)} of {len(parts[0])}, "
            f"reported {len(self._reported)} of {len(parts[1])}{large_group_text([d.key for part in parts for d in part])}"
        )

    def _two_sources(self, first: list[Document]) -> tuple[tuple[list[Document], list[Document]], str]:
        """The documents of both sides, apart, and what was dropped, in words."""
        assert self.test_file is not None
        _, second = read_task_file(self.test_file, self.name, self.data, self.tokenizer, self.shape)
        if {d.kind for d in first} != {d.kind for d in second}:
            raise DataError(
                f"Task {self.name!r}: {self.file} holds {first[0].kind!r} documents and {self.test_file} "
                f"{second[0].kind!r} ones; both files need one format."
            )
        joined = join_copies([*first, *second])
        first, second = joined[: len(first)], joined[len(first) :]
        keys = {d.key for d in second}
        kept = [d for d in first if d.key not in keys]
        if not kept:
            raise DataError(
                f"Task {self.name!r}: all {len(first)} documents of {self.file} also stand in "
                f"{self.test_file}. What is searched on cannot be reported on; give it other documents."
            )
        dropped = f", {len(first) - len(kept)} dropped as also reported" if len(kept) < len(first) else ""
        return (kept, second), dropped

    def grade(self, document: Document, responses: Sequence[tuple[float, bool]]) -> dict[str, float]:
        """``acc`` (and ``acc_norm``) of a choice; of a target ``acc``: is it what greedy decoding gives."""
        if document.kind == "choice":
            return grade_choice(document, responses, [len(a.removeprefix(" ")) for a in document.answers])
        return {"acc": float(responses[0][1])}


class SampledTask(EvalTask):
    """A user's task with targets, sampled.

    ``task``: whose documents they are. Its tokenizer says how many tokens an answer may have (a token per character without
    one), its ``data`` which pass@k is reported.

    Raises:
        DataError: When the task's documents have no targets.
    """

    def __init__(self, task: UserTask) -> None:
        documents = [*task.reference(), *task.reported()]
        other = next((d for d in documents if d.kind != "target"), None)
        if other is not None:
            raise DataError(
                f"Task {task.name!r}: sampled: takes rows with a prompt and its target; {other.id} is of kind {other.kind!r}."
            )
        self.name, self.note, self.metric = task.name, f"{task.note}; sampled", f"pass@{task.data.pass_at}"
        self._estimator = task.data.estimator
        # What ends its line needs no token behind it.
        self._until = ("\n",) if all(d.reference.endswith("\n") for d in documents) else ()
        tokenizer = task.tokenizer
        length = len if tokenizer is None else lambda text: len(tokenizer.encode(text, add_special_tokens=False))
        how: dict[str, Any] = {"kind": "generate", "answers": (), "gold": None, "until": self._until}
        how["max_new_tokens"] = max(length(d.reference) for d in documents) + 1
        self._reference, self._reported = (
            [replace(d, **how) for d in side] for side in (task.reference(), task.reported())
        )

    def grade(self, document: Document, responses: Sequence[str]) -> dict[str, float]:
        """pass@k for every k of 1, 10 and 100 up to the number of samples."""
        target = document.reference.removesuffix("\n") if self._until else document.reference
        right = [text == target if self._until else text.startswith(target) for text in responses]
        return {f"pass@{k}": passed_at(right, k, self._estimator) for k in PASS_AT if k <= len(right)}


def _source_label(source: str | Path) -> str:
    """How a source is called in a note."""
    return str(source) if str(source).startswith(HUB) else Path(source).name
