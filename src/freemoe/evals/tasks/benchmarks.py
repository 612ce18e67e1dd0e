"""The one table that says, for every named benchmark, which split is reference and which is reported.

Prompts, choices, filters and metrics are lm-eval's own (its YAML file of the task); a row here only says
where the documents lie, in which format, and what may be searched on. Several benchmarks name no split to
tune on, or report on the split one would tune on: their reference is another split, or a part carved off by
content key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from freemoe.core.errors import RecipeError
from freemoe.core.registry import unknown_name
from freemoe.evals.tasks import benchmark_files as files
from freemoe.evals.tasks.benchmark_files import Reader, Row
from freemoe.evals.tasks.documents import Kind


@dataclass(frozen=True)
class Sources:
    """Which source split plays which part; the same one twice means that it is carved by content key.

    Attributes:
        reference: Source split that may be searched on, or several joined by ``+``; empty when another
            benchmark lends its own.
        reported: Source split that is only reported on.
        shots: Source split of the few-shot examples; empty when lm-eval's YAML holds them.
    """

    reference: str
    reported: str
    shots: str = ""

    @property
    def references(self) -> list[str]:
        """The source splits that may be searched on."""
        return [s for s in self.reference.split("+") if s]

    @property
    def carved(self) -> bool:
        """Whether one source split is cut in two by content key."""
        return self.reported in self.references

    def needed(self, shots: bool) -> list[str]:
        """The source splits to be read, each once."""
        wanted = [*self.references, self.reported, self.shots if shots else ""]
        return [s for s in dict.fromkeys(wanted) if s]

    def plus(self, extra: Sequence[str]) -> Sources:
        """The same with more source splits to search on."""
        more = [s for s in extra if s not in self.references]
        return replace(self, reference="+".join([*self.references, *more])) if self.reference else self


@dataclass(frozen=True)
class Benchmark:
    """One row.

    Attributes:
        name: Name of the task.
        about: One line for ``freemoe ls``.
        yaml: lm-eval's file, below its folder of tasks; ``{subject}`` is filled in.
        kind: How its documents are scored.
        metric: The reported metric, as `grade` names it.
        paths: Source split -> file below ``data_root``; ``{subject}`` is filled in.
        read: Reader of these files.
        local: The splits when documents come from files.
        hub: The splits when they come from the hub, in the hub's names.
        key: What a document is about, for its content key.
        gold: Gold answer as text, where lm-eval's target is not one (code).
        scored: lm-eval's name of the metric, where it differs.
        filter: lm-eval's filter whose answer is the reported one; empty when there is one only.
        num_fewshot: Few-shot examples unless told otherwise (the papers': MMLU 5, others 0).
        lender: Benchmark that lends its reference documents.
        overrides: Entries of the YAML that do not hold for the files' format.
        subjects: Sub-tasks; empty when there are none.
    """

    name: str
    about: str
    yaml: str
    kind: Kind
    metric: str
    paths: dict[str, str]
    read: Reader
    local: Sources
    hub: Sources
    key: Callable[[Row], tuple[str, ...]]
    gold: Callable[[Row], str] | None = None
    scored: str = ""
    filter: str = ""
    num_fewshot: int = 0
    lender: str = ""
    overrides: dict[str, object] = field(default_factory=dict)
    subjects: tuple[str, ...] = ()

    @property
    def split_note(self) -> str:
        """Which split is reference and which is reported, for files."""
        return describe(self.local, self.lender)


def describe(sources: Sources, lender: str = "") -> str:
    """In words: which split is reference, which is reported, what is carved."""
    if lender:
        return f"reference borrowed from {lender} (no split of its own), reported {sources.reported}"
    if sources.carved:
        return f"reference and reported carved from {sources.reported} by content key, one half each"
    return f"reference {sources.reference}, reported {sources.reported}"


_SUBJECTS = """
    abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry
    college_computer_science college_mathematics college_medicine college_physics computer_security
    conceptual_physics econometrics electrical_engineering elementary_mathematics formal_logic global_facts
    high_school_biology high_school_chemistry high_school_computer_science high_school_european_history
    high_school_geography high_school_government_and_politics high_school_macroeconomics
    high_school_mathematics high_school_microeconomics high_school_physics high_school_psychology
    high_school_statistics high_school_us_history high_school_world_history human_aging human_sexuality
    international_law jurisprudence logical_fallacies machine_learning management marketing medical_genetics
    miscellaneous moral_disputes moral_scenarios nutrition philosophy prehistory professional_accounting
    professional_law professional_medicine professional_psychology public_relations security_studies
    sociology us_foreign_policy virology world_religions
"""
MMLU_SUBJECTS = tuple(_SUBJECTS.split())


def _labelled_answer(row: Row) -> str:
    """Text of the right choice where choices have labels."""
    return row["choices"]["text"][row["choices"]["label"].index(row["answerKey"].strip())]


def _arc(name: str, folder: str) -> Benchmark:
    return Benchmark(
        name=name,
        about=f"Grade-school science questions ({folder}), likelihood of the answer's text",
        yaml=f"arc/{name}.yaml",
        kind="choice",
        metric="acc",
        paths={
            split: f"arc/{folder}/{folder}-{part}.jsonl"
            for split, part in (("train", "Train"), ("validation", "Dev"), ("test", "Test"))
        },
        read=files.arc_jsonl,
        local=Sources("validation", "test", "train"),
        hub=Sources("validation", "test", "train"),
        key=lambda row: (row["question"], _labelled_answer(row)),
    )


TABLE: tuple[Benchmark, ...] = (
    Benchmark(
        name="mmlu",
        about="57 subjects, four choices, likelihood of the answer's letter (also mmlu_SUBJECT)",
        yaml="mmlu/default/mmlu_{subject}.yaml",
        kind="choice",
        metric="acc",
        paths={
            "dev": "mmlu/dev/{subject}_dev.csv",
            "validation": "mmlu/val/{subject}_val.csv",
            "test": "mmlu/test/{subject}_test.csv",
        },
        read=files.mmlu_csv,
        local=Sources("validation", "test", "dev"),
        hub=Sources("validation", "test", "dev"),
        key=lambda row: (row["question"], row["choices"][row["answer"]]),
        num_fewshot=5,
        subjects=MMLU_SUBJECTS,
    ),
    Benchmark(
        name="gsm8k",
        about="Grade-school arithmetic in words, generated; the last number of the answer is compared",
        yaml="gsm8k/gsm8k.yaml",
        kind="generate",
        metric="exact_match",
        # Zero-shot answers do not know the data set's "####", which the strict filter asks for.
        filter="flexible-extract",
        paths={"train": "gsm8k/train.jsonl", "test": "gsm8k/test.jsonl"},
        read=files.jsonl("question", "answer"),
        local=Sources("train", "test", "train"),
        hub=Sources("train", "test", "train"),
        key=lambda row: (row["question"],),
    ),
    Benchmark(
        name="mathqa",
        about="Arithmetic in words, five choices, likelihood of the answer's text",
        yaml="mathqa/mathqa.yaml",
        kind="choice",
        metric="acc",
        paths={"validation": "mathqa/dev.json", "test": "mathqa/test.json"},
        read=files.json_list("Problem", "options", "correct"),
        local=Sources("validation", "test", "validation"),
        hub=Sources("validation", "test", "train"),
        key=lambda row: (row["Problem"],),
    ),
    Benchmark(
        name="humaneval",
        about="Python functions from their docstrings, generated and run against tests",
        yaml="humaneval/humaneval.yaml",
        kind="code",
        metric="pass@1",
        paths={"test": "humaneval/HumanEval.jsonl.gz"},
        read=files.jsonl_gz("task_id", "prompt", "canonical_solution", "test", "entry_point"),
        local=Sources("", "test"),
        hub=Sources("", "test"),
        key=lambda row: (row["prompt"],),
        gold=lambda row: row["canonical_solution"],
        lender="mbpp",
    ),
    Benchmark(
        name="mbpp",
        about="Short Python programs from one sentence, generated and run against tests",
        yaml="mbpp/mbpp.yaml",
        kind="code",
        metric="pass@1",
        scored="pass_at_1",
        # One file holds all; ids 1-10 are few-shot, 11-510 test, 511-600 validation, 601-974 train.
        paths={"validation": "mbpp/mbpp.jsonl", "test": "mbpp/mbpp.jsonl", "train": "mbpp/mbpp.jsonl"},
        read=files.jsonl("task_id", "text", "code", "test_list"),
        local=Sources("validation", "test"),
        hub=Sources("validation", "test"),
        key=lambda row: (row["text"],),
        gold=lambda row: row["code"].replace("\r\n", "\n") + "\n[DONE]",
    ),
    _arc("arc_easy", "ARC-Easy"),
    _arc("arc_challenge", "ARC-Challenge"),
    Benchmark(
        name="hellaswag",
        about="Which of four endings follows, likelihood of the ending",
        yaml="hellaswag/hellaswag.yaml",
        kind="choice",
        metric="acc",
        paths={"validation": "hellaswag/hellaswag_val_olmes1000.jsonl"},
        read=files.hellaswag_jsonl,
        local=Sources("validation", "validation", "validation"),
        hub=Sources("train", "validation", "train"),
        key=lambda row: (row["query"] if "query" in row else row["activity_label"] + ": " + row["ctx"],),
        overrides={"process_docs": None},
    ),
    Benchmark(
        name="openbookqa",
        about="Elementary science, four choices, likelihood of the answer's text",
        yaml="openbookqa/openbookqa.yaml",
        kind="choice",
        metric="acc",
        paths={
            split: f"openbookqa/{part}.tsv"
            for split, part in (("train", "train"), ("validation", "dev"), ("test", "test"))
        },
        read=files.openbookqa_tsv,
        local=Sources("validation", "test", "train"),
        hub=Sources("validation", "test", "train"),
        key=lambda row: (row["question_stem"], _labelled_answer(row)),
    ),
    Benchmark(
        name="rte",
        about="Does the first sentence entail the second, likelihood of True and False",
        yaml="glue/rte/default.yaml",
        kind="choice",
        metric="acc",
        paths={"validation": "rte/dev.jsonl"},
        read=files.jsonl("sentence1", "sentence2", "label"),
        local=Sources("validation", "validation", "validation"),
        hub=Sources("train", "validation", "train"),
        # Several hypotheses may share a premise.
        key=lambda row: (row["sentence1"],),
    ),
    Benchmark(
        name="wikitext",
        about="WikiText-2, raw text in blocks of 256 tokens, nats per token (no rolling word perplexity)",
        yaml="",
        kind="text",
        metric="raw_block_nll",
        paths={"validation": "wikitext-2-raw/wiki.valid.raw", "test": "wikitext-2-raw/wiki.test.raw"},
        read=lambda path: [{"text": files.read_text_file(path)}],
        local=Sources("validation", "test"),
        hub=Sources("validation", "test"),
        key=lambda row: (row["text"],),
    ),
)

BENCHMARKS: dict[str, Benchmark] = {row.name: row for row in TABLE}


def find_benchmark(spec: str) -> tuple[Benchmark, tuple[str, ...], int | None, tuple[str, ...]]:
    """Read ``task``, ``task@N`` or ``mmlu_SUBJECT``, each also as ``task+train`` to search on train too.

    Returns:
        The row, the subjects that are meant, the few-shot count if the spec has one, and the added splits.

    Raises:
        UnknownNameError: With near misses, when nothing has that name.
        RecipeError: When ``@N`` or ``+SPLIT`` is none that the task knows.
    """
    rest, at, count = spec.partition("@")
    name, *extra = rest.split("+")
    if at and not count.isdecimal():
        raise RecipeError(f"Task {spec!r}: {count!r} is no few-shot count; write {name}@5 for five examples.")
    shots = int(count) if at else None
    if name.startswith("mmlu_"):
        subject = name.removeprefix("mmlu_")
        if subject not in MMLU_SUBJECTS:
            raise unknown_name("task", name, [f"mmlu_{s}" for s in MMLU_SUBJECTS])
        row, subjects = BENCHMARKS["mmlu"], (subject,)
    elif name in BENCHMARKS:
        row = BENCHMARKS[name]
        subjects = row.subjects
    else:
        advice = "A file of your own: FILE.jsonl, or text:FILE for plain text."
        raise unknown_name("task", name, list(BENCHMARKS), advice)
    if shots and row.kind == "text":
        raise RecipeError(f"Task {spec!r}: plain text takes no few-shot examples; write {name}.")
    lends = BENCHMARKS[row.lender] if row.lender else row
    for split in extra:
        if split != "train" or split not in lends.paths:
            allowed = f"{name}+train" if "train" in lends.paths else f"{name} alone"
            raise RecipeError(f"Task {spec!r}: {split!r} cannot be added to its reference; allowed: {allowed}.")
    return row, subjects, shots, tuple(extra)
