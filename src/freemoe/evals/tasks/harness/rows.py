"""Rows of a benchmark by role, and lm-eval's task object over them, which renders and grades.

Few-shot examples are one fixed draw per task, so that all its documents share a prefix, or one for each document as lm-eval's
default sampler draws them, one document after the other. A subset of documents changes no prompt in either way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

from freemoe.compat.lm_eval import generation_settings, task_of
from freemoe.core.errors import DataError
from freemoe.evals.tasks.benchmark import BenchmarkSpec, SplitSources
from freemoe.evals.tasks.benchmark_files import Row
from freemoe.evals.tasks.documents import Document, content_key
from freemoe.evals.tasks.splits import carve_by_key, seeded_rank
from freemoe.text.hub_data import load_hub_data

RowsBySplit = dict[str, list[Row]]

SHOT_SHARE = 0.1  # Share of the reference's content keys kept for few-shot examples where both come from one source
MOST_TOKENS = 256  # Tokens of a generation where a task does not say, as lm-eval has it
DRAW_SEED = 1234  # Of lm-eval's draws of few-shot examples, where nobody asks for another one

MBPP_IDS = {"train": range(601, 975), "validation": range(511, 601), "test": range(11, 511)}


def require_lm_eval(task: str | None = None, needs: Sequence[str] = (), extra: str = "") -> None:
    """Raise unless lm-eval can be imported, and what it imports for a task; names the task that asked for it."""
    wanted = ["lm_eval", "datasets", "evaluate", *needs]
    missing = [m for m in wanted if importlib.util.find_spec(m) is None]
    if missing:
        extras = "eval" + (f",{extra}" if extra else "")
        raise DataError(
            ("This" if task is None else f"Task {task!r}")
            + f" needs lm-eval, and {', '.join(missing)} is not installed here. pip install 'freemoe[{extras}]'"
            + ("." if task is None else ", or use a task of your own (FILE.jsonl).")
        )


# ---------------------------------------------------------------------- rows


def local_rows(row: BenchmarkSpec, root: Path, subject: str, splits: Sequence[str]) -> RowsBySplit:
    """Rows of the named source splits from files below ``root``."""
    found: RowsBySplit = {}
    for split in splits:
        path = root / row.source_path(split, subject)
        if not path.exists():
            raise DataError(
                f"Task {row.name!r}: no file at {path.absolute()}. --data-root must hold the original files: "
                f"{', '.join(dict.fromkeys(row.paths.values()))}" + (f" ({row.origin})." if row.origin else ".")
            )
        rows = row.read(path)
        if row.name == "mbpp":
            rows = [r for r in rows if r["task_id"] in MBPP_IDS[split]]
        if not rows:
            raise DataError(f"Task {row.name!r}: {path} has no document of the split {split!r}.")
        found[split] = rows
    return found


def hub_rows(row: BenchmarkSpec, config: dict[str, Any], splits: Sequence[str]) -> RowsBySplit:
    """Rows of the named source splits from the hub's data set that lm-eval's YAML names."""
    path, name = config["dataset_path"], config.get("dataset_name")
    try:
        return {s: [dict(r) for r in load_hub_data(path, name, s)] for s in splits}
    except DataError as error:
        raise type(error)(
            f"Task {row.name!r}: the data set {path} could not be read from the hub. {error} Without a network give the original "
            f"files: --data-root FOLDER with {', '.join(dict.fromkeys(row.paths.values()))}."
        ) from error


class LmEvalSubtask:
    """One task of lm-eval's (a subject, or a whole benchmark): its rows by role, its object when needed."""

    def __init__(
        self, row: BenchmarkSpec, config: dict[str, Any], subject: str, local: bool, shots: int, draw: str = "task"
    ) -> None:
        self.row, self.config, self.subject, self.local, self.shots = row, config, subject, local, shots
        # The first ones are for every document where the task says so: MMLU's are fixed by its authors.
        self.is_fixed = config.get("fewshot_config", {}).get("sampler") == "first_n"
        self.draws_each = draw == "document" and shots > 0 and not self.is_fixed
        self._random, self._draws, self._pool = Random(DRAW_SEED), list[list[int]](), list[Row]()
        self._pool_keys = list[str]()
        self.rows: dict[str, list[tuple[str, Row]]] = {}  # role -> (name in the source, row)
        self.dropped = 0
        self._task: Any = None

    def _assign_roles(self, source: RowsBySplit, sources: SplitSources, seed: int) -> None:
        named = {s: [(f"{s}:{n}", r) for n, r in enumerate(rows)] for s, rows in source.items()}
        reported = named[sources.reported]
        reference = [item for s in sources.reference_splits for item in named[s]]
        if sources.is_carved:
            first, second = carve_by_key([self.row_content_key(r) for _, r in reported], 0.5, seed)
            reference, reported = [reported[i] for i in first], [reported[i] for i in second]
        self.rows = {"reference": reference, "reported": reported, "shots": named.get(sources.shots, [])}

    def _drop_reported(self, reported: set[str], sources: SplitSources, seed: int) -> None:
        """Drop reference rows that any part reports on, and part the few-shot examples from the rest."""
        kept = [item for item in self.rows["reference"] if self.row_content_key(item[1]) not in reported]
        self.dropped = len(self.rows["reference"]) - len(kept)
        pool = self.rows["shots"] if self.shots else []
        if pool and sources.shots in sources.reference_splits:
            first, second = carve_by_key([self.row_content_key(r) for _, r in kept], SHOT_SHARE, seed)
            pool, kept = [kept[i] for i in first], [kept[i] for i in second]
        if not (self.is_fixed or self.draws_each):
            # Ours to draw: no example is a document of either split.
            taken = reported | {self.row_content_key(r) for _, r in kept}
            pool = [item for item in pool if self.row_content_key(item[1]) not in taken]
            pool.sort(key=lambda item: seeded_rank(seed, "shots", item[0]))
        self.rows |= {"reference": kept, "shots": pool}
        there = len(pool)
        fixed = self.config.get("fewshot_config", {}).get("samples")
        if fixed is not None:  # written into the YAML, or into a function that it names
            samples: Any = fixed() if callable(fixed) else fixed
            there = len(samples)
        if self.shots > there:
            raise DataError(
                f"Task {self.row.name!r}: {self.shots} few-shot examples asked for, {there} there. Write "
                f"{self.row.name}@{there}."
            )

    def row_content_key(self, row: Row) -> str:
        """Content key of a row."""
        return content_key(*self.row.key(row))

    def shots_note(self, sources: SplitSources) -> str:
        """How many few-shot examples there are, where they come from, and how they are drawn."""
        if not self.shots:
            return "0-shot"
        pool = "a tenth of the reference, kept apart" if sources.shots in sources.reference_splits else sources.shots
        drawn = "drawn anew for every document" if self.draws_each else "the same for every document"
        return f"{self.shots}-shot from {pool or 'the examples of the YAML'}, {drawn}"

    @property
    def lm_eval_task(self) -> Any:
        """lm-eval's task object over our rows."""
        if self._task is None:
            from datasets import Dataset

            roles = {role: Dataset.from_list([r for _, r in rows]) for role, rows in self.rows.items() if rows}
            config = dict(self.config)
            if self.local:
                config.update(self.row.overrides)
            process = config.get("process_docs")
            if process is not None:  # once for every role, so that a row of any of them can be asked for
                roles = {role: process(data) for role, data in roles.items()}
            config.update(
                task=f"{self.row.name}_{self.subject}" if self.subject else self.row.name,
                custom_dataset=lambda **_: roles,
                process_docs=None,
                training_split=None,
                validation_split=None,
                test_split="reported",
                num_fewshot=self.shots,
            )
            shots = dict(config.get("fewshot_config") or {})
            shots["sampler"] = "first_n"
            config["fewshot_config"] = shots
            if "samples" not in shots:
                config["fewshot_split"] = "shots" if "shots" in roles else "reported"
            for name in ("tag", "group", "include", "dataset_kwargs"):
                config.pop(name, None)
            self._task = task_of(config)
        return self._task

    def _draw_shots(self, number: int, key: str) -> list[Row]:
        """The examples of the document with a number in its split: the draw of that number, as lm-eval goes through a split.

        Where lm-eval would show the document itself, the next row of the pool stands.
        """
        if not self._draws:
            self._pool = list(self.lm_eval_task.sampler.fewshot_docs())
            self._pool_keys = [self.row_content_key(row) for _, row in self.rows["shots"]] or [""] * len(self._pool)
        while len(self._draws) <= number:
            self._draws.append(self._random.sample(range(len(self._pool)), self.shots))
        others = (i if self._pool_keys[i] != key else (i + 1) % len(self._pool) for i in self._draws[number])
        return [self._pool[i] for i in others]

    def render_document(self, role: str, place: int, task: str) -> tuple[Document, Row]:
        """Render one row through lm-eval; also return the row as lm-eval sees it."""
        row, lm_task = self.row, self.lm_eval_task
        name, _ = self.rows[role][place]
        doc = lm_task.dataset[role][place]
        split, _, number = name.partition(":")
        if self.draws_each:
            lm_task.sampler.replace_df(self._draw_shots(int(number), self.row_content_key(self.rows[role][place][1])))
        context = lm_task.fewshot_context(doc, num_fewshot=self.shots, gen_prefix=lm_task.doc_to_prefix(doc))
        made = lm_task.construct_requests(doc=doc, ctx=context, metadata=(task, place, 1))
        common: dict[str, Any] = {
            "task": task,
            "id": ":".join(p for p in (split, self.subject, number) if p),
            "key": self.row_content_key(self.rows[role][place][1]),
            "about": row.key(self.rows[role][place][1]),
            "kind": row.kind,
            "field": self.subject,
            "index": int(number),
        }
        if row.kind == "choice":
            answers = tuple(i.args[1] for i in made)
            gold = gold_index(lm_task, doc)
            if not 0 <= gold < len(answers):
                raise DataError(f"{task} {name}: right answer {gold}, but lm-eval makes {len(answers)} choices of it.")
            contexts = tuple(i.args[0] for i in made)
            if lm_task.multiple_input:
                return with_contexts(contexts, answers, gold, common), doc
            return Document(**common, prompt=contexts[0], answers=answers, gold=gold, reference=answers[gold]), doc
        instance = made[0] if isinstance(made, list) else made
        if row.kind == "target":
            prompt, target = instance.args
            return Document(**common, prompt=prompt, answers=(target,), gold=0, reference=target), doc
        prompt, how = instance.args
        gold_text = row.gold(doc) if row.gold else lm_task.config.target_delimiter + lm_task.doc_to_target(doc)
        how = generation_settings(how, MOST_TOKENS)
        until, most = tuple(how["until"] or ()), how["max_gen_toks"]
        return Document(**common, prompt=prompt, reference=gold_text, until=until, max_new_tokens=most), doc


def divide_rows(
    parts: Sequence[tuple[LmEvalSubtask, RowsBySplit]], sources: SplitSources, seed: int
) -> list[LmEvalSubtask]:
    """Give every row of a task's parts its role; no content key has two, in whichever parts."""
    for part, rows in parts:
        part._assign_roles(rows, sources, seed)
    reported = {part.row_content_key(row) for part, _ in parts for _, row in part.rows["reported"]}
    for part, _ in parts:
        part._drop_reported(reported, sources, seed)
    return [part for part, _ in parts]


def with_contexts(contexts: tuple[str, ...], answers: tuple[str, ...], gold: int, common: dict[str, Any]) -> Document:
    """A document whose choices are different contexts of one continuation; its prompt has a blank in their place."""
    shared = "".join(here[0] for here in takewhile(lambda here: len(set(here)) == 1, zip(*contexts, strict=False)))
    # Up to a whole word, so that nothing of a choice stands in the prompt.
    shared = shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]
    return Document(
        **common,
        prompt=f"{shared}_{answers[0]}",
        contexts=contexts,
        answers=answers,
        gold=gold,
        reference=contexts[gold][len(shared) :] + answers[gold],
    )


def gold_index(task: Any, doc: Row) -> int:
    """Which of a document's choices is right: the first, where lm-eval takes several; -1 for none."""
    target = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    target = (target[0] if target else -1) if isinstance(target, list) else target
    if isinstance(target, int):
        return target
    choices = task.doc_to_choice(doc)
    return choices.index(target) if target in choices else -1
