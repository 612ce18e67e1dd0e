"""`python -m reproduce check`: what ours measures at the paper's own scale against what the paper's tables say they measure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.evals.tasks.benchmark import TaskName
from freemoe.evals.tasks.benchmarks import find_benchmark
from reproduce.runs import Run, run_of
from reproduce.table import Scene, Table

ACCURACY = {"exact_match": "acc"}
"""The accuracy of an answer that is written, as papers call it."""


@dataclass(frozen=True)
class Stated:
    """How a column is measured; what nobody says is empty."""

    metric: str = ""  # ``acc``, ``acc_norm``, ``pass@10``, ``perplexity``
    shots: str = ""  # Few-shot examples
    split: str = ""  # Of the task's documents
    length: str = ""  # Tokens of context

    @classmethod
    def read(cls, text: str) -> Stated:
        """``METRIC[@SHOTS] [SPLIT] [LENGTH]``, each where the paper says it; of ``pass@10@0`` the first is the metric's."""
        first, *rest = text.split()
        parts = first.split("@")
        metric = 2 if parts[0] == "pass" else 1
        length, split = (next((word for word in rest if word.isdecimal() == number), "") for number in (True, False))
        return cls("@".join(parts[:metric]), "".join(parts[metric:]), split, length)


def of_task(spec: str) -> Stated:
    """What a task ``NAME[@SHOTS][:METRIC]`` measures."""
    task = TaskName.parse(spec)
    row, _ = find_benchmark(task)
    metric, split = task.metric or row.metric, (row.hub or row.local).reported
    if row.kind == "text":
        return Stated(metric, "", split, str(task.shots or ""))
    return Stated(ACCURACY.get(metric, metric), str(row.num_fewshot if task.shots is None else task.shots), split)


def of_run(run: Run) -> dict[str, Stated]:
    """Column -> what a run at the paper's own scale measures."""
    if not isinstance(run.recipe, BuildRecipe):
        tasks = run.arguments["tasks"]
        return {name: of_task(spec if isinstance(spec, str) else spec[0]) for name, spec in tasks.items()}
    found = {}
    for task in (task for tasks in run.recipe.domains.values() for task in tasks):
        own = of_task(task)
        code = [f"pass@{k}" for k in (1, 10) if own.metric.startswith("pass@") and k <= (run.recipe.data.samples or 1)]
        found |= {f"{task} {k}": Stated(k, own.shots, own.split) for k in code} or {task: own}
    return found


def differences(table: Table) -> dict[str, str]:
    """Column -> what ours measures there, and what the paper says; of columns that are measured and that the paper states."""
    measured: dict[str, dict[Stated, None]] = {}
    for row in table.runs:
        for column, own in of_run(run_of(row, table, Scene("paper"))).items():
            measured.setdefault(column, {})[own] = None
    found = {}
    stated = {column: Stated.read(text) for column, text in table.states.items() if column != "source"}
    for column in dict.fromkeys([*measured, *stated]):
        paper, all_ours = stated.get(column), measured.get(column, {})
        for own in all_ours:
            apart = [
                f.name for f in fields(Stated) if paper and getattr(paper, f.name) not in ("", getattr(own, f.name))
            ]
            if paper is None:
                found[column] = (
                    f"ours {own.metric}, {own.shots or 'no'} examples, {own.split}: nothing is typed of the paper"
                )
            elif apart:
                sides = "; ".join(
                    f"{a}: ours {getattr(own, a) or 'none'}, the paper {getattr(paper, a)}" for a in apart
                )
                found[column] = f"{sides} ({table.states.get('source', 'no source')})"
        if not all_ours and column in table.columns:
            found[column] = f"the paper has {table.states[column]}, ours does not measure it"
    return found
