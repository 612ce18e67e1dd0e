"""The one table that says, for every named benchmark, which split is reference and which is reported.

Prompts, choices, filters and metrics are lm-eval's own (its YAML file of the task); a row here only says
where the documents lie, in which format, and what may be searched on. Several benchmarks name no split to
tune on, or report on the split one would tune on: their reference is another split, or a part carved off by
content key.
"""

from __future__ import annotations

from typing import Any

from freemoe.core.errors import RecipeError
from freemoe.core.registry import unknown_name
from freemoe.evals.tasks import benchmark_files as files
from freemoe.evals.tasks.benchmark import BenchmarkSpec, SplitSources, TaskName
from freemoe.evals.tasks.benchmark_files import Row

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

_MATH_FOLDERS = {
    "counting_and_prob": "counting_and_probability",
    "num_theory": "number_theory",
    "precalc": "precalculus",
}
MATH_SUBJECTS = (
    "algebra",
    "counting_and_prob",
    "geometry",
    "intermediate_algebra",
    "num_theory",
    "prealgebra",
    "precalc",
)


def _math_benchmark(name: str, about: str, **more: Any) -> BenchmarkSpec:
    return BenchmarkSpec(
        name=name,
        about=about,
        yaml=f"{name}/{name}_{{subject}}.yaml",
        kind="generate",
        metric="exact_match",
        paths={split: f"math/{split}/{{subject}}" for split in ("train", "test")},
        read=files.math_folder,
        local=SplitSources("train", "test", "train"),
        key=lambda row: (row["problem"],),
        subjects=MATH_SUBJECTS,
        folders=_MATH_FOLDERS,
        origin="MATH.tar of github.com/hendrycks/math, unpacked as math/: 12,500 JSON files, 20 MB packed",
        **more,
    )


def _labelled_answer(row: Row) -> str:
    """Text of the right choice where choices have labels."""
    return row["choices"]["text"][row["choices"]["label"].index(row["answerKey"].strip())]


def _arc_benchmark(name: str, folder: str) -> BenchmarkSpec:
    return BenchmarkSpec(
        name=name,
        about=f"Grade-school science questions ({folder}), likelihood of the answer's text",
        yaml=f"arc/{name}.yaml",
        paths={
            split: f"arc/{folder}/{folder}-{part}.jsonl"
            for split, part in (("train", "Train"), ("validation", "Dev"), ("test", "Test"))
        },
        read=files.arc_jsonl,
        local=SplitSources("validation", "test", "train"),
        key=lambda row: (row["question"], _labelled_answer(row)),
    )


def _truthfulqa_benchmark(name: str, about: str) -> BenchmarkSpec:
    return BenchmarkSpec(
        name=name,
        about=about,
        yaml=f"truthfulqa/{name}.yaml",
        paths={"validation": "truthfulqa/mc_task.json"},
        read=files.truthfulqa_json,
        local=SplitSources("validation", "validation"),
        key=lambda row: (row["question"],),
        origin="data/mc_task.json of github.com/sylinrl/TruthfulQA, 817 questions, 1 MB",
    )


def _wikitext(name: str, about: str, metric: str = "raw_block_nll") -> BenchmarkSpec:
    return BenchmarkSpec(
        name=name,
        about=about,
        kind="text",
        metric=metric,
        paths={"validation": "wikitext-2-raw/wiki.valid.raw", "test": "wikitext-2-raw/wiki.test.raw"},
        read=lambda path: [{"text": files.read_text_file(path)}],
        local=SplitSources("validation", "test"),
        key=lambda row: (row["text"],),
    )


TABLE: tuple[BenchmarkSpec, ...] = (
    BenchmarkSpec(
        name="mmlu",
        about="57 subjects, four choices, likelihood of the answer's letter (also mmlu_SUBJECT)",
        yaml="mmlu/default/mmlu_{subject}.yaml",
        paths={
            "dev": "mmlu/dev/{subject}_dev.csv",
            "validation": "mmlu/val/{subject}_val.csv",
            "test": "mmlu/test/{subject}_test.csv",
        },
        read=files.mmlu_csv,
        local=SplitSources("validation", "test", "dev"),
        key=lambda row: (row["question"], row["choices"][row["answer"]]),
        num_fewshot=5,
        subjects=MMLU_SUBJECTS,
    ),
    BenchmarkSpec(
        name="gsm8k",
        about="Grade-school arithmetic in words, generated; the last number of the answer is compared",
        yaml="gsm8k/gsm8k.yaml",
        kind="generate",
        metric="exact_match",
        # Zero-shot answers do not know the data set's "####", which the strict filter asks for.
        filter="flexible-extract",
        paths={"train": "gsm8k/train.jsonl", "test": "gsm8k/test.jsonl"},
        read=files.rows_reader("question", "answer"),
        local=SplitSources("train", "test", "train"),
        key=lambda row: (row["question"],),
    ),
    BenchmarkSpec(
        name="mathqa",
        about="Arithmetic in words, five choices, likelihood of the answer's text",
        yaml="mathqa/mathqa.yaml",
        paths={"validation": "mathqa/dev.json", "test": "mathqa/test.json"},
        read=files.rows_reader("Problem", "options", "correct"),
        local=SplitSources("validation", "test", "validation"),
        hub=SplitSources("validation", "test", "train"),
        key=lambda row: (row["Problem"],),
    ),
    BenchmarkSpec(
        name="humaneval",
        about="Python functions from their docstrings, generated and run against tests",
        yaml="humaneval/humaneval.yaml",
        kind="code",
        metric="pass@1",
        paths={"test": "humaneval/HumanEval.jsonl.gz"},
        read=files.jsonl_gz_reader("task_id", "prompt", "canonical_solution", "test", "entry_point"),
        local=SplitSources("", "test"),
        key=lambda row: (row["prompt"],),
        gold=lambda row: row["canonical_solution"],
        lender="mbpp",
    ),
    BenchmarkSpec(
        name="mbpp",
        about="Short Python programs from one sentence, generated and run against tests",
        yaml="mbpp/mbpp.yaml",
        kind="code",
        metric="pass@1",
        scored="pass_at_1",
        # One file holds all; ids 1-10 are few-shot, 11-510 test, 511-600 validation, 601-974 train.
        paths={"validation": "mbpp/mbpp.jsonl", "test": "mbpp/mbpp.jsonl", "train": "mbpp/mbpp.jsonl"},
        read=files.rows_reader("task_id", "text", "code", "test_list"),
        local=SplitSources("validation", "test"),
        key=lambda row: (row["text"],),
        gold=lambda row: row["code"].replace("\r\n", "\n") + "\n[DONE]",
    ),
    _math_benchmark(
        "hendrycks_math",
        "Competition mathematics (MATH), generated; the text between dollar signs is compared (also hendrycks_math_SUBJECT)",
    ),
    _math_benchmark(
        "minerva_math",
        "The same with four worked examples; the final answer is compared as an expression (also minerva_math_SUBJECT)",
        num_fewshot=4,
        # As lm-eval's examples say it, which is what its grader looks for.
        gold=lambda row: (
            f" {row['solution']}\nFinal Answer: The final answer is ${row['answer']}$. I hope it is correct."
        ),
        extra="math",
        needs=("sympy", "antlr4", "math_verify"),
    ),
    _arc_benchmark("arc_easy", "ARC-Easy"),
    _arc_benchmark("arc_challenge", "ARC-Challenge"),
    BenchmarkSpec(
        name="hellaswag",
        about="Which of four endings follows, likelihood of the ending",
        yaml="hellaswag/hellaswag.yaml",
        paths={"validation": "hellaswag/hellaswag_val_olmes1000.jsonl"},
        read=files.hellaswag_jsonl,
        local=SplitSources("validation", "validation", "validation"),
        hub=SplitSources("train", "validation", "train"),
        key=lambda row: (row["query"] if "query" in row else row["activity_label"] + ": " + row["ctx"],),
        overrides={"process_docs": None},
    ),
    BenchmarkSpec(
        name="openbookqa",
        about="Elementary science, four choices, likelihood of the answer's text",
        yaml="openbookqa/openbookqa.yaml",
        paths={
            split: f"openbookqa/{part}.tsv"
            for split, part in (("train", "train"), ("validation", "dev"), ("test", "test"))
        },
        read=files.openbookqa_tsv,
        local=SplitSources("validation", "test", "train"),
        key=lambda row: (row["question_stem"], _labelled_answer(row)),
    ),
    BenchmarkSpec(
        name="rte",
        about="Does the first sentence entail the second, likelihood of True and False",
        yaml="glue/rte/default.yaml",
        paths={"validation": "rte/dev.jsonl"},
        read=files.rows_reader("sentence1", "sentence2", "label"),
        local=SplitSources("validation", "validation", "validation"),
        hub=SplitSources("train", "validation", "train"),
        # Several hypotheses may share a premise.
        key=lambda row: (row["sentence1"],),
    ),
    BenchmarkSpec(
        name="boolq",
        about="Yes or no about a passage (SuperGLUE), likelihood of the word",
        yaml="super_glue/boolq/default.yaml",
        paths={"train": "boolq/train.jsonl", "validation": "boolq/val.jsonl"},
        read=files.boolq_jsonl,
        local=SplitSources("train", "validation", "train"),
        # Several questions may share a passage.
        key=lambda row: (row["passage"],),
        origin="BoolQ.zip of SuperGLUE (super.gluebenchmark.com), 9,427 and 3,270 questions, 4 MB packed",
    ),
    BenchmarkSpec(
        name="winogrande",
        about="Which of two words a pronoun stands for, likelihood of the sentence's end after each (partial scoring)",
        yaml="winogrande/default.yaml",
        paths={"train": "winogrande/train_xl.jsonl", "validation": "winogrande/dev.jsonl"},
        read=files.rows_reader("sentence", "option1", "option2", "answer"),
        local=SplitSources("train", "validation", "train"),
        key=lambda row: (row["sentence"], *sorted((row["option1"], row["option2"]))),
        origin="winogrande_1.1.zip of github.com/allenai/winogrande, 40,398 and 1,267 sentences, 3 MB packed",
    ),
    BenchmarkSpec(
        name="sciq",
        about="Science questions after a supporting passage, four choices, likelihood of the answer's text",
        yaml="sciq/sciq.yaml",
        paths={"train": "sciq/train.json", "validation": "sciq/valid.json", "test": "sciq/test.json"},
        read=files.rows_reader("question", "distractor1", "distractor2", "distractor3", "correct_answer", "support"),
        local=SplitSources("validation", "test", "train"),
        key=lambda row: (row["question"], row["correct_answer"]),
        origin="SciQ.zip of allenai.org/data/sciq, 11,679, 1,000 and 1,000 questions, 3 MB packed",
    ),
    BenchmarkSpec(
        name="piqa",
        about="Which of two ways reaches a goal, likelihood of the way",
        yaml="piqa/piqa.yaml",
        paths={"train": "piqa/train.jsonl", "validation": "piqa/valid.jsonl"},
        read=files.piqa_jsonl,
        local=SplitSources("train", "validation", "train"),
        key=lambda row: (row["goal"],),
        origin="physicaliqa-train-dev.zip of yonatanbisk.com/piqa with its two lists of labels (valid may be called dev there), "
        "16,113 and 1,838 goals, 2 MB packed",
    ),
    _truthfulqa_benchmark(
        "truthfulqa_mc1", "Questions that people answer wrongly: is the one true answer the likeliest"
    ),
    _truthfulqa_benchmark("truthfulqa_mc2", "The same: share of the probability that the true answers have"),
    _wikitext("wikitext", "WikiText-2, raw text in blocks of 256 tokens, nats per token (no rolling word perplexity)"),
    _wikitext(
        "wikitext2",
        "WikiText-2 as one text in windows of 2,048 tokens (wikitext2@4096: of 4,096), perplexity per token and per word",
        metric="perplexity",
    ),
)

BENCHMARKS: dict[str, BenchmarkSpec] = {row.name: row for row in TABLE}


def find_benchmark(task: TaskName) -> tuple[BenchmarkSpec, tuple[str, ...]]:
    """The row of a task's name, and the subjects that are meant.

    Raises:
        UnknownNameError: With near misses, when nothing has that name.
        RecipeError: When ``@N`` or ``+SPLIT`` is none that the task knows.
    """
    name = task.name
    whole = next((b for b in TABLE if b.subjects and name.startswith(f"{b.name}_")), None)
    if whole is not None:
        subject = name.removeprefix(f"{whole.name}_")
        if subject not in whole.subjects:
            raise unknown_name("task", name, [f"{whole.name}_{s}" for s in whole.subjects])
        row, subjects = whole, (subject,)
    elif name in BENCHMARKS:
        row = BENCHMARKS[name]
        subjects = row.subjects
    else:
        advice = "A file of your own: FILE.jsonl, or text:FILE for plain text."
        raise unknown_name("task", name, list(BENCHMARKS), advice)
    if task.shots and row.kind == "text" and row.metric != "perplexity":
        raise RecipeError(f"Task {task.spec!r}: plain text takes no few-shot examples; write {name}.")
    lends = BENCHMARKS[row.lender] if row.lender else row
    for split in task.splits:
        if split != "train" or split not in lends.paths:
            allowed = f"{name}+train" if "train" in lends.paths else f"{name} alone"
            raise RecipeError(f"Task {task.spec!r}: {split!r} cannot be added to its reference; allowed: {allowed}.")
    return row, subjects
