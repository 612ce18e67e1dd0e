"""Rows of the table of benchmarks (`benchmarks`) whose answers are chosen by likelihood."""

from __future__ import annotations

from freemoe.evals.tasks import benchmark_files as files
from freemoe.evals.tasks.benchmark import BenchmarkSpec, SplitSources
from freemoe.evals.tasks.benchmark_files import Row


def _labelled_answer(row: Row) -> str:
    """Text of the right choice where choices have labels."""
    return row["choices"]["text"][row["choices"]["label"].index(row["answerKey"].strip())]


def _arc_benchmark(name: str, folder: str) -> BenchmarkSpec:
    return BenchmarkSpec(
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
        local=SplitSources("validation", "test", "train"),
        hub=SplitSources("validation", "test", "train"),
        key=lambda row: (row["question"], _labelled_answer(row)),
    )


def _truthfulqa_benchmark(name: str, about: str) -> BenchmarkSpec:
    return BenchmarkSpec(
        name=name,
        about=about,
        yaml=f"truthfulqa/{name}.yaml",
        kind="choice",
        metric="acc",
        paths={"validation": "truthfulqa/mc_task.json"},
        read=files.truthfulqa_json,
        local=SplitSources("validation", "validation"),
        hub=SplitSources("validation", "validation"),
        key=lambda row: (row["question"],),
        origin="data/mc_task.json of github.com/sylinrl/TruthfulQA, 817 questions, 1 MB",
    )


CHOICES: tuple[BenchmarkSpec, ...] = (
    _arc_benchmark("arc_easy", "ARC-Easy"),
    _arc_benchmark("arc_challenge", "ARC-Challenge"),
    BenchmarkSpec(
        name="hellaswag",
        about="Which of four endings follows, likelihood of the ending",
        yaml="hellaswag/hellaswag.yaml",
        kind="choice",
        metric="acc",
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
        kind="choice",
        metric="acc",
        paths={
            split: f"openbookqa/{part}.tsv"
            for split, part in (("train", "train"), ("validation", "dev"), ("test", "test"))
        },
        read=files.openbookqa_tsv,
        local=SplitSources("validation", "test", "train"),
        hub=SplitSources("validation", "test", "train"),
        key=lambda row: (row["question_stem"], _labelled_answer(row)),
    ),
    BenchmarkSpec(
        name="rte",
        about="Does the first sentence entail the second, likelihood of True and False",
        yaml="glue/rte/default.yaml",
        kind="choice",
        metric="acc",
        paths={"validation": "rte/dev.jsonl"},
        read=files.jsonl_reader("sentence1", "sentence2", "label"),
        local=SplitSources("validation", "validation", "validation"),
        hub=SplitSources("train", "validation", "train"),
        # Several hypotheses may share a premise.
        key=lambda row: (row["sentence1"],),
    ),
    BenchmarkSpec(
        name="boolq",
        about="Yes or no about a passage (SuperGLUE), likelihood of the word",
        yaml="super_glue/boolq/default.yaml",
        kind="choice",
        metric="acc",
        paths={"train": "boolq/train.jsonl", "validation": "boolq/val.jsonl"},
        read=files.boolq_jsonl,
        local=SplitSources("train", "validation", "train"),
        hub=SplitSources("train", "validation", "train"),
        # Several questions may share a passage.
        key=lambda row: (row["passage"],),
        origin="BoolQ.zip of SuperGLUE (super.gluebenchmark.com), 9,427 and 3,270 questions, 4 MB packed",
    ),
    BenchmarkSpec(
        name="winogrande",
        about="Which of two words a pronoun stands for, likelihood of the sentence's end after each (partial scoring)",
        yaml="winogrande/default.yaml",
        kind="choice",
        metric="acc",
        paths={"train": "winogrande/train_xl.jsonl", "validation": "winogrande/dev.jsonl"},
        read=files.jsonl_reader("sentence", "option1", "option2", "answer"),
        local=SplitSources("train", "validation", "train"),
        hub=SplitSources("train", "validation", "train"),
        key=lambda row: (row["sentence"], *sorted((row["option1"], row["option2"]))),
        origin="winogrande_1.1.zip of github.com/allenai/winogrande, 40,398 and 1,267 sentences, 3 MB packed",
    ),
    BenchmarkSpec(
        name="sciq",
        about="Science questions after a supporting passage, four choices, likelihood of the answer's text",
        yaml="sciq/sciq.yaml",
        kind="choice",
        metric="acc",
        paths={"train": "sciq/train.json", "validation": "sciq/valid.json", "test": "sciq/test.json"},
        read=files.json_list_reader(
            "question", "distractor1", "distractor2", "distractor3", "correct_answer", "support"
        ),
        local=SplitSources("validation", "test", "train"),
        hub=SplitSources("validation", "test", "train"),
        key=lambda row: (row["question"], row["correct_answer"]),
        origin="SciQ.zip of allenai.org/data/sciq, 11,679, 1,000 and 1,000 questions, 3 MB packed",
    ),
    BenchmarkSpec(
        name="piqa",
        about="Which of two ways reaches a goal, likelihood of the way",
        yaml="piqa/piqa.yaml",
        kind="choice",
        metric="acc",
        paths={"train": "piqa/train.jsonl", "validation": "piqa/valid.jsonl"},
        read=files.piqa_jsonl,
        local=SplitSources("train", "validation", "train"),
        hub=SplitSources("train", "validation", "train"),
        key=lambda row: (row["goal"],),
        origin="physicaliqa-train-dev.zip of yonatanbisk.com/piqa with its two lists of labels (valid may be called dev there), "
        "16,113 and 1,838 goals, 2 MB packed",
    ),
    _truthfulqa_benchmark(
        "truthfulqa_mc1", "Questions that people answer wrongly: is the one true answer the likeliest"
    ),
    _truthfulqa_benchmark("truthfulqa_mc2", "The same: share of the probability that the true answers have"),
)
"""In the order of `freemoe ls tasks`."""
