"""Tasks of lm-eval in YAML with little files to go with them, in the words of the bundled model's world."""

import csv

import yaml

from tests.rows import write_rows

SIZES = {"train": 30, "validation": 24, "test": 20}

CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_target": "gold",
    "doc_to_choice": "{{[first, second, third]}}",
    "target_delimiter": "",
    "metric_list": [
        {"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
    ],
}
GENERATE = {
    "output_type": "generate_until",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{first}}",
    "doc_to_choice": None,
    "target_delimiter": "",
    "generation_kwargs": {"until": ["\n", " "], "max_new_tokens": 5, "do_sample": False},
    "filter_list": [
        {"name": "whole", "filter": [{"function": "take_first"}]},
        {
            "name": "digits",
            "filter": [{"function": "regex", "regex_pattern": "(-?[0-9]+)"}, {"function": "take_first"}],
        },
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
TARGET = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{first}}",
    "doc_to_choice": None,
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}


def rows(split):
    """Sums in the words of the bundled model's world, right answer at ``gold``."""
    start = {"train": 0, "validation": 300, "test": 600}[split]
    found = []
    for i in range(start, start + SIZES[split]):
        answers, turn = [str(i + 5), str(i + 4), str(2 * i + 1)], i % 3
        first, second, third = answers[-turn:] + answers[:-turn]
        question = f"12+{i % 50}={12 + i % 50}\n{i}+5="
        found.append({"q": question, "first": first, "second": second, "third": third, "gold": turn})
    return found


def write_files(folder, form="json", splits=None):
    """One file per split; returns lm-eval's ``data_files``."""
    files = {}
    for split, found in (splits or {s: rows(s) for s in SIZES}).items():
        path = folder / f"{split}.{form}"
        if form == "json":
            write_rows(path, found)
        elif form == "csv":
            with path.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, list(found[0]))
                writer.writeheader()
                writer.writerows(found)
        else:
            from datasets import Dataset

            Dataset.from_list(found).to_parquet(path)
        files[split] = str(path)
    return files


def write_task(folder, name="sums", form="json", files=None, **changes):
    """A YAML of a task; the folder for ``--task-folder``."""
    config = {
        "task": name,
        "dataset_path": form,
        "dataset_kwargs": {"data_files": files or write_files(folder, form)},
        "training_split": "train",
        "validation_split": "validation",
        "test_split": "test",
        **CHOICE,
        **changes,
    }
    tasks = folder / "tasks"
    tasks.mkdir(exist_ok=True)
    (tasks / f"{name}.yaml").write_text(yaml.safe_dump({k: v for k, v in config.items() if v is not None}))
    return str(tasks)
