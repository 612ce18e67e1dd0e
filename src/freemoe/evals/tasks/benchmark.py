"""What a named benchmark's row says: where its documents lie, and which split may be searched on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from freemoe.core.errors import RecipeError
from freemoe.evals.tasks.benchmark_files import Reader, Row
from freemoe.evals.tasks.documents import Kind

LM_EVAL = "lm_eval:"  # Before the name of a task of lm-eval that the table of benchmarks does not hold


@dataclass(frozen=True)
class TaskName:
    """What names a task: ``NAME[+SPLIT][@SHOTS][:METRIC]``, of lm-eval's other tasks after ``lm_eval:``."""

    spec: str  # As it was written
    name: str  # Of the task, or of one subject of it
    splits: tuple[str, ...] = ()  # What is to be done beyond its own splits: ``train``, ``carve``
    shots: int | None = None  # Few-shot examples; None where the name does not say
    # The figure that is searched and reported; empty where the name does not say: the task's own then
    metric: str = ""

    @classmethod
    def parse(cls, spec: str) -> TaskName:
        """Read a task's name.

        Raises:
            RecipeError: When a part of it cannot be read.
        """
        prefix = LM_EVAL if spec.startswith(LM_EVAL) else ""
        rest, colon, metric = spec.removeprefix(prefix).partition(":")
        rest, at, count = rest.partition("@")
        name, *splits = (part.strip() for part in rest.split("+"))
        if not name:
            raise RecipeError(f"Task {spec!r} names no task; write {prefix}NAME, for example {prefix}sciq.")
        if at and not (count.isdecimal() and len(count) < 10):
            raise RecipeError(
                f"Task {spec!r}: {count!r} is no few-shot count; write {prefix}{name}@5 for five examples."
            )
        if colon and not metric.strip():
            raise RecipeError(f"Task {spec!r} names no metric behind its colon; write {prefix}{name}:acc, for example.")
        return cls(spec, name, tuple(splits), int(count) if at else None, metric.strip())

    @property
    def label(self) -> str:
        """What results call the task: all that was written where a metric is part of it, else the name alone."""
        return self.spec.removeprefix(LM_EVAL) if self.metric else self.name

    def require_metric(self, known: Sequence[str]) -> str:
        """The metric to report: the one that is named, or else the first of those that the task has.

        Raises:
            RecipeError: The task has no such metric.
        """
        if self.metric and self.metric not in known:
            raise RecipeError(
                f"Task {self.spec!r}: {self.name} has no metric {self.metric!r}, but {', '.join(known)}. "
                "A name is NAME@SHOTS:METRIC."
            )
        return self.metric or known[0]


@dataclass(frozen=True)
class SplitSources:
    """Which source split plays which part; the same one twice means that it is carved by content key."""

    # Source split that may be searched on, or several joined by ``+``; empty when another benchmark lends its own
    reference: str
    reported: str  # Source split that is only reported on
    shots: str = ""  # Source split of the few-shot examples; empty when lm-eval's YAML holds them

    @property
    def reference_splits(self) -> list[str]:
        """The source splits that may be searched on."""
        return [s for s in self.reference.split("+") if s]

    @property
    def is_carved(self) -> bool:
        """Whether one source split is cut in two by content key."""
        return self.reported in self.reference_splits

    def required_splits(self, shots: bool) -> list[str]:
        """The source splits to be read, each once."""
        wanted = [*self.reference_splits, self.reported, self.shots if shots else ""]
        return [s for s in dict.fromkeys(wanted) if s]

    def with_references(self, extra: Sequence[str]) -> SplitSources:
        """The same with more source splits to search on."""
        more = [s for s in extra if s not in self.reference_splits]
        return replace(self, reference="+".join([*self.reference_splits, *more])) if self.reference else self


@dataclass(frozen=True, kw_only=True)
class BenchmarkSpec:
    """One row of the table of benchmarks."""

    name: str
    about: str = ""  # One line for ``freemoe ls``
    yaml: str = ""  # lm-eval's file, below its folder of tasks; ``{subject}`` is filled in
    kind: Kind = "choice"  # How its documents are scored
    metric: str = "acc"  # The reported metric, as `grade` names it
    # Source split -> file below ``data_root``; ``{subject}`` is filled in
    paths: dict[str, str] = field(default_factory=dict)
    read: Reader = field(default=lambda path: [])  # Reader of these files
    local: SplitSources  # The splits when documents come from files
    # The splits when they come from the hub, in the hub's names; None where these are the same
    hub: SplitSources | None = None
    key: Callable[[Row], tuple[str, ...]]  # What a document is about, for its content key
    gold: Callable[[Row], str] | None = None  # Gold answer as text, where lm-eval's target is not one (code)
    scored: str = ""  # lm-eval's name of the metric, where it differs
    filter: str = ""  # lm-eval's filter whose answer is the reported one; empty when there is one only
    num_fewshot: int = 0  # Few-shot examples unless told otherwise (the papers': MMLU 5, others 0)
    lender: str = ""  # Benchmark that lends its reference documents
    # Entries of the YAML that do not hold for the files' format
    overrides: dict[str, object] = field(default_factory=dict)
    subjects: tuple[str, ...] = ()  # Sub-tasks; empty when there are none
    folders: dict[str, str] = field(default_factory=dict)  # Subject -> its name in ``paths``, where that differs
    origin: str = ""  # Where the files come from, and how large they are
    extra: str = ""  # The extra of freemoe's that brings what lm-eval's functions of the task import, beyond ``eval``
    needs: tuple[str, ...] = ()  # Modules that this extra brings

    def source_path(self, split: str, subject: str) -> str:
        """The file, or folder, of a source split below the data root."""
        return self.paths[split].format(subject=self.folders.get(subject, subject))

    @property
    def split_note(self) -> str:
        """Which split is reference and which is reported, for files."""
        return describe_splits(self.local, self.lender)


def describe_splits(sources: SplitSources, lender: str = "") -> str:
    """In words: which split is reference, which is reported, what is carved."""
    if lender:
        return f"reference borrowed from {lender} (no split of its own), reported {sources.reported}"
    if sources.is_carved:
        return f"reference and reported carved from {sources.reported} by content key, one half each"
    return f"reference {sources.reference}, reported {sources.reported}"
