"""Named benchmarks through lm-eval: its YAML makes prompts, choices and grades; our table names the splits.

Documents are made for drawn rows only, from rows that are already apart by split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from freemoe.compat.lm_eval import averaged_metrics, filters_of, official_config, templates_compiled_once
from freemoe.core.errors import DataError
from freemoe.evals.sandbox.code_metric import SandboxedCodeEval, sandboxed_code_eval
from freemoe.evals.sandbox.runner import PASS_AT, passed_at, require_permission
from freemoe.evals.tasks.benchmark import BenchmarkSpec, SplitSources, TaskName, describe_splits
from freemoe.evals.tasks.benchmark_files import Row
from freemoe.evals.tasks.benchmarks import find_benchmark
from freemoe.evals.tasks.documents import Document
from freemoe.evals.tasks.harness.rows import LmEvalSubtask, divide_rows, hub_rows, local_rows, require_lm_eval
from freemoe.evals.tasks.splits import draw_balanced
from freemoe.evals.tasks.task import EvalTask
from freemoe.evals.tasks.text_tasks import TextTask, WindowTask
from freemoe.recipes import DataSection


class LmEvalTask(EvalTask):
    """A task whose documents lm-eval renders and grades: a benchmark of the table, or any other (`any_task`).

    ``task``: how it was named: its name within its domain, and which metric it reports. ``parts``: one per subject, with
    their rows. ``data``: how many documents each split has at most, and how pass@k of code is reported. ``lender``: task
    whose reference documents are borrowed. ``about``: what else its note says.
    """

    def __init__(
        self,
        task: TaskName,
        parts: list[LmEvalSubtask],
        sources: SplitSources,
        data: DataSection,
        seed: int,
        lender: EvalTask | None = None,
        about: Sequence[str] = (),
    ) -> None:
        self.row, self.name, self.lender = parts[0].row, task.label, lender
        known = [self.row.metric]
        if self.row.kind == "code":
            known = [f"pass@{k}" for k in (data.pass_at, *PASS_AT) if k <= (data.samples or data.pass_at)]
        elif task.metric:
            known += [metric for metric, mean in averaged_metrics(parts[0].lm_eval_task).items() if mean]
        self.metric = task.require_metric(list(dict.fromkeys(known)))
        self._parts, self._data, self._seed = parts, data, seed
        self._rows: dict[str, tuple[LmEvalSubtask, Row]] = {}
        self.note = f"{self.name}: " + "; ".join([*self._splits_note(sources), *about, parts[0].shots_note(sources)])

    def _splits_note(self, sources: SplitSources) -> list[str]:
        words = [describe_splits(sources, self.row.lender)]
        if dropped := sum(part.dropped for part in self._parts):
            words.append(f"{dropped} reference documents dropped as also reported")
        for role in ("reported",) if self.row.lender else ("reference", "reported"):
            size = sum(len(part.rows[role]) for part in self._parts)
            words.append(f"{role} {size if self._data.limit is None else min(size, self._data.limit)} of {size}")
        return words

    # Rendered when they are asked for: of a benchmark that lends, the reported documents never are.
    @cached_property
    def _reference(self) -> Sequence[Document]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._draw_documents("reference") if self.lender is None else self.lender.reference()

    @cached_property
    def _reported(self) -> Sequence[Document]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._draw_documents("reported")

    def _draw_documents(self, role: str) -> list[Document]:
        places = [(part, place) for part in self._parts for place in range(len(part.rows[role]))]
        names = [f"{part.subject}:{part.rows[role][place][0]}" for part, place in places]
        taken = draw_balanced(names, [part.subject for part, _ in places], self._data.limit, self._seed)
        documents = []
        with templates_compiled_once():
            for i in taken:
                part, place = places[i]
                document, doc = part.render_document(role, place, self.name)
                self._rows[document.id] = (part, doc)
                documents.append(document)
        return documents

    def grade(self, document: Document, responses: Sequence[Any]) -> dict[str, float]:
        """Grade one document by lm-eval's filters and metrics.

        Several completions give the mean of each metric; for code pass@k for every k of 1, 10 and 100 up to their number.

        Raises:
            SandboxError: For code, unless running generated code was allowed.
        """
        if self.lender is not None and document.task == self.lender.name:
            return self.lender.grade(document, responses)
        if document.id not in self._rows:
            raise DataError(f"{self.name} has no document {document.id!r}; grade documents of this very task object.")
        part, doc = self._rows[document.id]
        if self.row.kind in ("choice", "target"):
            with templates_compiled_once():
                scores = part.lm_eval_task.process_results(doc, list(responses))
            return _numeric_scores(scores)
        if self.row.kind == "code":
            require_permission(self._data.allow_code_execution)
        graded = [self._grade_completion(part, doc, text) for text in responses]
        if self.row.kind == "code":
            passed = [g["pass@1"] > 0 for g in graded]
            return {f"pass@{k}": passed_at(passed, k, self._data.estimator) for k in PASS_AT if k <= len(graded)}
        return {k: sum(g[k] for g in graded) / len(graded) for k in graded[0]}

    def _grade_completion(self, part: LmEvalSubtask, doc: Row, text: str) -> dict[str, float]:
        from lm_eval.api.instance import Instance

        instance = Instance(request_type="generate_until", doc=doc, arguments=("", {}), idx=0)
        instance.resps = [text]
        found: dict[str, float] = {}
        filters = filters_of(part.lm_eval_task)
        for ensemble in filters:
            ensemble.apply([instance])
            scores = part.lm_eval_task.process_results(doc, [instance.filtered_resps[ensemble.name]])
            reported = len(filters) == 1 or ensemble.name == self.row.filter
            for name, value in _numeric_scores(scores).items():
                ours = self.row.metric if name == self.row.scored else name
                found[ours if reported else f"{ours},{ensemble.name}"] = value
        return found


def _numeric_scores(scores: Mapping[str, Any]) -> dict[str, float]:
    """What lm-eval made of one document, less what only a whole split makes a figure of (pairs of gold and answer)."""
    return {name: float(value) for name, value in scores.items() if isinstance(value, Real | np.bool_)}


# ---------------------------------------------------------------------- making them


def named_task(task: TaskName, data: DataSection, tokenizer: Any, seed: int) -> EvalTask:
    """Build the task of a benchmark's name; arguments as in `freemoe.evals.tasks.domains.load_domain`.

    Raises:
        UnknownNameError: When no benchmark has that name.
        DataError: When lm-eval or the files are missing, or the hub cannot be reached.
    """
    row, subjects = find_benchmark(task)
    require_lm_eval(row.name, row.needs, row.extra)
    root = Path(data.root).expanduser() if data.root is not None else None
    sources = (row.local if root else row.hub or row.local).with_references(task.splits)
    if row.kind == "text":
        return _text_benchmark(row, task, root, sources, tokenizer, data.limit)
    shots = next(n for n in (task.shots, data.fewshot, row.num_fewshot) if n is not None)
    code = SandboxedCodeEval(allowed=data.allow_code_execution) if row.kind == "code" else None
    parts = []
    for subject in subjects or ("",):
        with sandboxed_code_eval(code):
            config = official_config(row.yaml.format(subject=subject))
        splits = sources.required_splits(bool(shots))
        rows = local_rows(row, root, subject, splits) if root else hub_rows(row, config, splits)
        parts.append((LmEvalSubtask(row, config, subject, root is not None, shots, data.fewshot_draw), rows))
    lender = None
    if row.lender:
        loan = "+".join((row.lender, *task.splits)) + (f":{task.metric}" if task.metric else "")
        lender = named_task(TaskName.parse(loan), data, tokenizer, seed)
    return LmEvalTask(task, divide_rows(parts, sources, seed), sources, data, seed, lender)


def _text_benchmark(
    row: BenchmarkSpec, task: TaskName, root: Path | None, sources: SplitSources, tokenizer: Any, limit: int | None
) -> TextTask | WindowTask:
    splits = sources.required_splits(False)
    if root is not None:
        rows = local_rows(row, root, "", splits)
    else:
        rows = hub_rows(row, {"dataset_path": "Salesforce/wikitext", "dataset_name": "wikitext-2-raw-v1"}, splits)
    # The hub's copy has an empty row for each empty line of the file.
    texts = ["".join(r["text"] or " \n" for r in rows[split]) for split in (sources.reference, sources.reported)]
    about = describe_splits(sources)
    if row.metric == "perplexity":
        # The hub's rows with blank lines between them, as GPTQ's code and all that follow it join them.
        lines = [[f"{line}\n" if line.strip() else "" for line in text.split("\n")[:-1]] for text in texts]
        return WindowTask(task, ["\n\n".join(text) for text in lines], about, tokenizer, limit)
    first, second = ([text] for text in texts)
    task.require_metric([row.metric])
    return TextTask(row.name, first, second, source=about, tokenizer=tokenizer, limit=limit, metric=row.metric)
