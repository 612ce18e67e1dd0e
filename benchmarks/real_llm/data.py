"""Materials (plain text) and tasks (questions): which files, which part is reference, which is reported.

Reference comes from train splits where there are any. Text is cut into blocks of 256 tokens as `text_tasks` does it;
questions are rendered by lm-eval, as `freemoe build` has them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.real_llm.protocol import Protocol
from freemoe.core.errors import DataError
from freemoe.domain_experts.recipe import SaliencySection
from freemoe.domain_experts.select.choice import split_by_share
from freemoe.evals.tasks.benchmark import TaskName
from freemoe.evals.tasks.benchmarks import find_benchmark
from freemoe.evals.tasks.documents import Document, FrozenChoice, content_key
from freemoe.evals.tasks.domains import join_tasks, load_domain
from freemoe.evals.tasks.harness.rows import MBPP_IDS
from freemoe.evals.tasks.splits import draw_balanced
from freemoe.evals.tasks.task import DomainData, EvalTask, TaskGrader, grade_choice
from freemoe.evals.tasks.text_tasks import TextTask
from freemoe.recipes import DataSection
from freemoe.text.documents import read_documents
from freemoe.text.files import read_json_lines, read_text_file

Texts = tuple[list[str], list[str] | None]

# As the questions of GSM8K are cut for matching; a context of 512 tokens of half a word each must hold both.
_QUESTION, _ANSWER, _CHOICES = 250, 160, 4


@dataclass(frozen=True)
class Material:
    """One material or task."""

    name: str  # Its name
    kind: Literal["text", "task"]  # ``text`` or ``task``
    files: tuple[str, ...]  # Patterns of its files below the data folder
    about: str  # Where reference and reported documents come from
    load: Callable[[Path, Any, Protocol], DomainData]  # Reads it: data folder, tokenizer, protocol -> the two splits


@dataclass(frozen=True)
class Parts:
    """A material's documents in their roles."""

    kind: Literal["text", "task"]  # ``text`` or ``task``
    gradient: list[Document]  # Reference documents that train
    stop: list[Document]  # Reference documents that stop
    guard: list[Document]  # Reference documents that neither trained nor stopped
    reported: list[Document]  # Documents that chose nothing
    graders: dict[str, TaskGrader]  # By the name of their task
    notes: tuple[str, ...]  # How the splits were made


def parts_of(material: Material, data: DomainData, protocol: Protocol, seed: int) -> Parts:
    """Part a material's reference as a build does it, and take its reported documents."""
    reference = list(data.reference.documents)
    if material.kind == "task":
        reference = _drawn(reference, protocol.reference)
    section = SaliencySection()
    keys = [d.key for d in reference]
    groups = split_by_share(keys, [section.gradient_share, section.stop_share], seed)
    gradient, stop, guard = ([reference[i] for i in part] for part in groups)
    # Nothing is chosen by what stands in a record, so its reported part may be opened.
    reported = list(data.reported.open(FrozenChoice("bench real")))
    if material.kind == "task":
        reported = _drawn(reported, protocol.questions)
    return Parts(material.kind, gradient, stop, guard, reported, data.graders, data.notes)


def _drawn(documents: Sequence[Document], limit: int) -> list[Document]:
    taken = draw_balanced([d.id for d in documents], [d.field for d in documents], limit)
    return [documents[i] for i in taken]


def load_parts(name: str, root: Path, tokenizer: Any, protocol: Protocol, seed: int) -> Parts:
    """Read a material and part it.

    Raises:
        DataError: When its files are not there.
    """
    material = MATERIALS[name]
    return parts_of(material, material.load(root, tokenizer, protocol), protocol, seed)


# -------------------------------------------------------------------------------------------- text


def text_material(name: str, files: tuple[str, ...], about: str, read: Callable[[Path], Texts]) -> Material:
    """A material of text: ``read`` gives its reference and its reported documents from the data folder."""

    def load(root: Path, tokenizer: Any, protocol: Protocol) -> DomainData:
        reference, reported = read(root)
        caps = {"reference": protocol.reference, "reported": protocol.blocks}
        task = TextTask(name, reference, reported, about, tokenizer, given=protocol.given, caps=caps)
        return join_tasks(name, {name: task})

    return Material(name, "text", files, about, load)


def needed(root: Path, name: str) -> Path:
    """A file or folder of the data folder.

    Raises:
        DataError: When it is not there.
    """
    path = root / name
    if not path.exists():
        raise DataError(f"{str(name)!r} is not under the data folder {root.resolve()} (--data-root). Check the path.")
    return path


def read_rows(root: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a JSONL file of the data folder."""
    return [row for _, row in read_json_lines(needed(root, name))]


def read_wikitext(root: Path) -> Texts:
    """WikiText-2: reference from the training text, reported from the test text."""
    names = ("wikitext2_train_5k.txt", "wiki.test.raw")
    train, test = (read_documents(needed(root, f"wikitext-2-raw/{name}")) for name in names)
    return train, test


def read_gsm8k(root: Path) -> Texts:
    """GSM8K as text, question and worked solution: reference from train, reported from test."""
    train, test = (
        [f"{r['question']}\n{r['answer']}" for r in read_rows(root, f"gsm8k/{split}.jsonl")]
        for split in ("train", "test")
    )
    return train, test


def _c4(root: Path) -> Texts:
    rows = json.loads(read_text_file(needed(root, "c4/c4_ref_gumbelsoft.json")))
    joined = [f"{r['input']} {r['output']}" for r in rows]
    return joined + read_documents(root / "c4/c4_demo.jsonl"), read_documents(root / "c4/c4_sample_200.jsonl")


def _code(root: Path) -> Texts:
    rows = read_rows(root, "mbpp/mbpp.jsonl")

    def of(*splits: str) -> list[str]:
        wanted = {i for s in splits for i in MBPP_IDS[s]}
        return [f"# {r['text']}\n{r['code'].replace(chr(13), '')}" for r in rows if r["task_id"] in wanted]

    return of("train", "validation"), of("test")


def _stories(root: Path) -> Texts:
    folder = root / "tinystories"
    return (
        read_documents(folder / "tiny_stories_train_excerpt.txt"),
        read_documents(folder / "TinyStories-valid_excerpt.txt"),
    )


# ------------------------------------------------------------------------------------------- tasks


def _named(name: str, spec: str, about: str) -> Material:
    """A benchmark of the table that `freemoe build` knows; ``spec`` without its count of few-shot examples."""
    row, _ = find_benchmark(TaskName.parse(spec))
    files = tuple(dict.fromkeys(path.replace("{subject}", "*") for path in row.paths.values()))

    def load(root: Path, tokenizer: Any, protocol: Protocol) -> DomainData:
        limit = max(protocol.reference, protocol.questions)
        return load_domain(name, [spec], DataSection(root=str(root), limit=limit, fewshot=0), tokenizer=tokenizer)

    return Material(name, "task", files, about, load)


def cut_solutions(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Questions of GSM8K and their solutions, enough of each to tell whose answer it is."""
    return [(r["question"][-_QUESTION:] + "\n", r["answer"][:_ANSWER]) for r in rows]


def matched(texts: Sequence[tuple[str, str]], rng: random.Random) -> list[tuple[str, tuple[str, ...], int]]:
    """Questions, each with its own answer among three of others, and the place of its own."""
    found = []
    for i, (question, answer) in enumerate(texts):
        others = [texts[j][1] for j in rng.sample([j for j in range(len(texts)) if j != i], _CHOICES - 1)]
        gold = rng.randrange(_CHOICES)
        found.append((question, (*others[:gold], answer, *others[gold:]), gold))
    return found


@dataclass
class MatchingTask(EvalTask):
    """Which of four worked solutions belongs to the question; the other three are other questions'."""

    root: Path
    limit: int
    name: str = "gsm8k-matching"
    metric: str = "acc"
    note: str = "gsm8k-matching: reference train, reported test; the other answers are other questions' of the split"

    def __post_init__(self) -> None:
        self._reference, self._reported = map(self._documents, ("train", "test"))

    def _documents(self, split: str) -> list[Document]:
        rows = read_rows(self.root, f"gsm8k/{split}.jsonl")
        items = matched(cut_solutions(rows), random.Random(f"gsm8k matching/{split}"))
        found = []
        for i, (row, (question, answers, gold)) in enumerate(zip(rows, items, strict=True)):
            identity, key, right = f"{split}:{i}", content_key(row["question"]), answers[gold]
            item = Document(self.name, identity, key, "choice", question, answers, gold, reference=right, index=i)
            found.append(item)
        return _drawn(found, self.limit)

    def grade(self, document: Document, responses: Sequence[tuple[float, bool]]) -> dict[str, float]:
        """Accuracy, plain and per character."""
        return grade_choice(document, responses, [len(a) for a in document.answers])


def _matching(root: Path, tokenizer: Any, protocol: Protocol) -> DomainData:
    task = MatchingTask(root, max(protocol.reference, protocol.questions))
    return join_tasks(task.name, {task.name: task})


TEXTS = (
    text_material("wikitext", ("wikitext-2-raw/wikitext2_train_5k.txt", "wikitext-2-raw/wiki.test.raw"),
          "WikiText-2: reference from train, reported from test", read_wikitext),
    text_material("gsm8k", ("gsm8k/train.jsonl", "gsm8k/test.jsonl"),
          "GSM8K, question and worked solution: reference from train, reported from test", read_gsm8k),
    text_material("c4", ("c4/*.json", "c4/*.jsonl"),
          "C4: reference two samples of it, reported a third", _c4),
    text_material("code", ("mbpp/mbpp.jsonl",),
          "MBPP's sentences and solutions: reference its train and validation ids, reported its test ids", _code),
)  # fmt: skip
HOME_TEXT = text_material(
    "tinystories", ("tinystories/*.txt",), "TinyStories: reference from train, reported from validation", _stories
)
TASKS = (
    _named("arc-easy", "arc_easy+train", "reference train and validation, reported test"),
    _named("arc-challenge", "arc_challenge+train", "reference train and validation, reported test"),
    _named("openbookqa", "openbookqa+train", "reference train and validation, reported test"),
    _named("hellaswag", "hellaswag", "no train split here: 1,000 validation questions carved in two"),
    _named("mathqa", "mathqa", "no train split here: reference validation, reported test"),
    _named("mmlu", "mmlu", "answer letters; no train split: reference validation, reported test"),
    _named("rte", "rte", "no train split here: 277 validation questions carved in two by premise"),
    Material("gsm8k-matching", "task", ("gsm8k/train.jsonl", "gsm8k/test.jsonl"),
             "reference train, reported test", _matching),
)  # fmt: skip
MATERIALS: dict[str, Material] = {m.name: m for m in (*TEXTS, *TASKS, HOME_TEXT)}
