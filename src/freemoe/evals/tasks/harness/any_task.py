"""Any task of lm-eval by its name, ``lm_eval:NAME``: its YAML says what is asked, how it is graded and which splits there are.

The table in `benchmarks` holds reviewed splits; here one rule picks them. Reported is what lm-eval scores on: the test split,
else the validation split. Reference is the validation or else the training split, whichever of them is not reported. A task with
one split only is refused, unless ``lm_eval:NAME+carve`` asks for that one to be cut in two by content key. The key is the
rendered question with its right answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from freemoe.compat.lm_eval import ListedTask, averaged_metrics, find_task, known_tasks, official_config
from freemoe.compat.lm_eval import templates_compiled_once as compiled_once
from freemoe.core.errors import DataError, FreeMoEError, RecipeError
from freemoe.core.registry import unknown_name
from freemoe.evals.tasks.benchmark import LM_EVAL, BenchmarkSpec, SplitSources, TaskName
from freemoe.evals.tasks.benchmark_files import Row
from freemoe.evals.tasks.documents import Kind
from freemoe.evals.tasks.harness.rows import LmEvalSubtask, RowsBySplit, divide_rows, gold_index, require_lm_eval
from freemoe.evals.tasks.harness.tasks import LmEvalTask
from freemoe.hub.reach import hub_session
from freemoe.recipes import DataSection

CARVE, TRAIN = "carve", "train"

KINDS: dict[str, Kind] = {"multiple_choice": "choice", "generate_until": "generate", "loglikelihood": "target"}
"""Kinds of tasks that are taken, by lm-eval's ``output_type``."""

FILES = ("json", "csv", "parquet", "arrow", "text", "pandas", "xml")
"""Values of ``dataset_path`` that read files rather than the hub."""


def any_task(task: TaskName, data: DataSection, seed: int) -> LmEvalTask:
    """Build a task of lm-eval's by its name.

    ``task``: ``lm_eval:NAME``, ``lm_eval:NAME@5``, ``lm_eval:NAME:acc_norm``, ``lm_eval:NAME+carve``,
    ``lm_eval:NAME+train``. ``data``: with the folder of the user's own YAML files; the task's own few-shot count holds
    where neither the name nor ``data`` say.

    Raises:
        UnknownNameError: With near misses, when no task has that name.
        RecipeError: When ``+RULE`` is none.
        DataError: When the task is of a kind that cannot be searched and reported here, says which and why; when its data cannot
            be read.
    """
    if len(task.splits) > 1 or not {*task.splits} <= {CARVE, TRAIN}:
        raise RecipeError(
            f"Task {task.spec!r}: allowed after the name are +{CARVE} (the reported split is cut in two by content key) or +{TRAIN} "
            f"(the training split may be searched on too), one of them, and @N."
        )
    require_lm_eval(task.spec)
    config = _load_config(task, _find_yaml_task(task, data.task_folder))
    sources = _choose_splits(task, config)
    shots = next(n for n in (task.shots, data.fewshot, config.get("num_fewshot"), 0) if n is not None)
    sources = replace(sources, shots=_shots_split(config, sources))
    rows = _load_rows(task, config, sources, shots)
    row, config, said = _make_benchmark(task, config, sources, rows[sources.reported])
    part = LmEvalSubtask(row, config, "", False, shots, data.fewshot_draw)
    with compiled_once():
        parts = divide_rows([(part, rows)], sources, seed)
    made = LmEvalTask(task, parts, sources, data, seed, about=["a task of lm-eval", said])
    _check_grading(task, made)
    return made


def _find_yaml_task(task: TaskName, folder: str | None) -> ListedTask:
    """What lm-eval has under the name, which must be one task of a YAML file."""
    root = Path(folder).expanduser() if folder else None
    if root is not None and not root.is_dir():
        raise DataError(f"No folder at {root.absolute()} (--task-folder). Check the path.")
    found = find_task(task.name, root.resolve() if root else None)
    if found is None:
        advice = "`freemoe lm-eval ls tasks` lists lm-eval's; --task-folder FOLDER adds YAML files of your own."
        raise unknown_name("task of lm-eval", task.name, known_tasks(root.resolve() if root else None), advice)
    if found.kind == "group":
        first = ", ".join(found.members[:5]) + (", ..." if len(found.members) > 5 else "")
        raise DataError(
            f"Task {task.spec!r}: {task.name} is a group of {len(found.members)} tasks of lm-eval ({first}). Name its tasks: "
            f"{','.join(LM_EVAL + member for member in found.members[:2])}"
        )
    if found.kind == "class":
        raise DataError(
            f"Task {task.spec!r}: {task.name} is written in Python (class); only tasks of one YAML file are taken."
        )
    return found


def _load_config(task: TaskName, listed: ListedTask) -> dict[str, Any]:
    """The task's configuration, once everything is refused that its file alone gives away."""
    if reason := _refusal_reason(listed.config):
        raise DataError(f"Task {task.spec!r}: {reason}")
    # A module beside the YAML, or what it imports.
    with _task_errors(task, f"{listed.yaml} names functions that cannot be loaded"):
        config = official_config(str(listed.yaml))
    shots = config.get("fewshot_config")
    return {**config, "fewshot_config": dict(shots) if isinstance(shots, Mapping) else {}}


def _refusal_reason(config: Mapping[str, Any]) -> str:
    """Why a task cannot be taken, by its file; empty where it can."""
    output = config.get("output_type", "generate_until")
    if output == "loglikelihood_rolling":
        return "it scores whole texts (loglikelihood_rolling). Give plain text as a domain of its own: text:FILE."
    if output not in KINDS:
        return f"its output_type is {output!r}; taken are {', '.join(KINDS)}."
    if config.get("unsafe_code"):
        return (
            "it runs generated programs. In freemoe's sandbox only humaneval and mbpp run: name those without "
            f"{LM_EVAL} and give --allow-code-execution."
        )
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        return "its documents hold pictures or sound; only text is taken."
    if (config.get("repeats") or 1) > 1:
        return (
            f"it generates {config['repeats']} answers to each question; one is taken. Copy its YAML without repeats."
        )
    how = config.get("generation_kwargs") or {}
    if how.get("do_sample") or float(how.get("temperature") or 0) > 0:
        return "it samples its answers, and ours are greedy. Copy its YAML with do_sample: false into --task-folder."
    return ""


# ---------------------------------------------------------------------- splits and rows


def _choose_splits(task: TaskName, config: Mapping[str, Any]) -> SplitSources:
    """Which split is searched on and which is reported."""
    name, extra = task.name, task.splits
    train, validation, test = (config.get(f"{split}_split") for split in ("training", "validation", "test"))
    reported = test or validation
    if not reported:
        raise DataError(
            f"Task {task.spec!r}: lm-eval scores {name} on no split: it names neither a test nor a validation split."
        )
    if extra == (CARVE,):
        return SplitSources(reported, reported)
    reference = next((split for split in (validation, train) if split and split != reported), "")
    if not reference:
        raise DataError(
            f"Task {task.spec!r}: {name} has one split only ({reported}), and what is searched on cannot be reported on. "
            f"{LM_EVAL}{name}+{CARVE} cuts it in two halves by content key."
        )
    if extra == (TRAIN,) and (not train or train in (reference, reported)):
        raise DataError(
            f"Task {task.spec!r}: {name} has no training split beside {reference} and {reported}. Leave +{TRAIN} out."
        )
    return SplitSources(reference, reported).with_references([str(train)] if extra == (TRAIN,) else [])


def _shots_split(config: Mapping[str, Any], sources: SplitSources) -> str:
    """Where few-shot examples come from: where lm-eval takes them, but never from what is reported."""
    own = config["fewshot_config"]
    if own.get("samples") is not None:
        return ""
    split = own.get("split") or config.get("fewshot_split") or config.get("training_split")
    return split if split and split != sources.reported else sources.reference_splits[0]


def _load_rows(task: TaskName, config: Mapping[str, Any], sources: SplitSources, shots: int) -> RowsBySplit:
    """Rows of the splits that are needed, as the task's own functions prepare them."""
    data = _load_dataset(task, config)
    found: RowsBySplit = {}
    for split in sources.required_splits(bool(shots)):
        if split not in data:
            raise DataError(f"Task {task.spec!r}: its data has no split {split!r}, but {', '.join(map(str, data))}.")
        process = config.get("process_docs")
        if split == sources.shots and split not in (*sources.reference_splits, sources.reported):
            process = config["fewshot_config"].get("process_docs") or process
        with _task_errors(task, f"its function for the split {split!r} fails"):
            rows = [dict(row) for row in (process(data[split]) if process else data[split])]
        if not rows:
            raise DataError(f"Task {task.spec!r}: its split {split!r} has no document.")
        wanted = (
            config["fewshot_config"].get("fewshot_indices") if split == sources.shots != sources.reference else None
        )
        found[split] = [rows[i] for i in wanted] if wanted else rows
    return found


def _load_dataset(task: TaskName, config: Mapping[str, Any]) -> Any:
    """The data set of a task by split, read as lm-eval reads it."""
    import datasets

    path, custom = config.get("dataset_path"), config.get("custom_dataset")
    options = {k: v for k, v in (config.get("dataset_kwargs") or {}).items() if k != "trust_remote_code"}
    try:
        if callable(custom):
            return custom(**(config.get("metadata") or {}), **options)
        with nullcontext() if path in FILES else hub_session():
            return datasets.load_dataset(path=path, name=config.get("dataset_name"), **options)  # pyright: ignore
    except Exception as error:  # the hub's client raises a dozen kinds of its own, and readers of files more
        where = f"the files that its YAML names ({path})" if path in FILES else f"the data set {path} from the hub"
        way = (
            "Paths are read from the current folder."
            if path in FILES
            else "Without a network: a YAML of your own in --task-folder whose dataset_path is json, csv or parquet."
        )
        raise DataError(f"Task {task.spec!r}: {where} could not be read ({_error_line(error)}). {way}") from error


# ---------------------------------------------------------------------- what is asked and graded


def _make_benchmark(
    wanted: TaskName, config: dict[str, Any], sources: SplitSources, rows: list[Row]
) -> tuple[BenchmarkSpec, dict[str, Any], str]:
    """The task as a row of the table would say it, the configuration to render with, and what to say of the metric."""
    own = {k: v for k, v in config["fewshot_config"].items() if k not in ("split", "process_docs", "fewshot_indices")}
    config = {**config, "process_docs": None, "fewshot_config": own}
    kind = KINDS[config.get("output_type", "generate_until")]
    filter_name = (config.get("filter_list") or [{}])[0].get("name", "")
    bare = BenchmarkSpec(name=LM_EVAL + wanted.name, kind=kind, local=sources, key=lambda row: (), filter=filter_name)
    view = LmEvalSubtask(bare, config, "", False, 0)
    view.rows = {"reported": [(f"{sources.reported}:0", rows[0])]}
    # A template, a missing column, a metric that is fetched.
    with _task_errors(wanted, "lm-eval cannot render its first document"):
        task = view.lm_eval_task
        metric, said, config["metric_list"] = _choose_metric(wanted, task, config.get("metric_list"))
        if task.multiple_input:
            raise DataError(
                f"Task {wanted.spec!r}: its choices are different prompts, not different answers; that is not taken."
            )
        # What a row is about: its rendered question without examples, and its right answer. Each row is rendered once.
        known: dict[int, tuple[Row, tuple[str, str]]] = {}

        def key(row: Row) -> tuple[str, str]:
            if id(row) not in known:
                known[id(row)] = row, (str(task.doc_to_text(row)), _gold_text(task, kind, row))
            return known[id(row)][1]

        key(rows[0])
    gold = (lambda row: _gold_text(task, kind, row)) if kind == "generate" else None
    return replace(bare, metric=metric, key=key, gold=gold), config, said


def _choose_metric(wanted: TaskName, task: Any, listed: Any) -> tuple[str, str, Any]:
    """The metric that is named, or the first that is a mean over documents; what to say of it; the list of metrics of that kind."""
    averaged = averaged_metrics(task)
    averaged["acc_mutual_info"] = False  # it asks for each answer without its question too
    usable = [metric for metric, mean in averaged.items() if mean]
    if not usable:
        known = ", ".join(metric for metric in averaged if metric in task.aggregation()) or "none"
        raise DataError(
            f"Task {wanted.spec!r}: {wanted.name} has no metric that is a mean over documents and better when it is higher; lm-eval has "
            f"{known}. A gain is compared document by document here."
        )
    before = [metric for metric in task.aggregation() if metric not in usable]
    left = f" ({', '.join(before)} left out: no mean over documents)" if before else ""
    # A metric's name, or its function.
    kept = listed and [entry for entry in listed if getattr(entry["metric"], "__name__", entry["metric"]) in usable]
    metric = wanted.require_metric(usable)
    return metric, f"metric {metric}{left}", kept


def _gold_text(task: Any, kind: Kind, row: Row) -> str:
    """A row's right answer as it stands after the prompt; the first, where lm-eval takes several."""
    delimiter = task.config.target_delimiter
    if kind == "choice":
        gold, choices = gold_index(task, row), task.doc_to_choice(row)
        return delimiter + str(choices[gold]) if 0 <= gold < len(choices) else ""
    target = task.doc_to_target(row)
    if kind == "target":
        return str(target)
    if task.config.doc_to_choice is not None and isinstance(target, int):
        target = task.doc_to_choice(row)[target]
    if isinstance(target, list):
        target = target[0] if target else ""
    return delimiter + str(target)


def _check_grading(name: TaskName, task: LmEvalTask) -> None:
    """Grade one document, so that what cannot be graded is known before anything is searched."""
    documents = task.reference()[:1] or task.reported()[:1]
    for document in documents:
        responses = [document.reference] if document.kind == "generate" else [(-1.0, False)] * len(document.answers)
        # The task's own function, or a metric that is fetched.
        with _task_errors(name, "lm-eval cannot grade its first document"):
            graded = task.grade(document, responses)
        value = graded.get(task.metric)
        if value is None or not 0 <= value <= 1:
            seen = ", ".join(f"{metric} {figure:g}" for metric, figure in graded.items()) or "no figure"
            raise DataError(
                f"Task {name.spec!r}: its metric {task.metric} must be a share from 0 to 1 for every document; lm-eval makes of the "
                f"first: {seen}."
            )


@contextmanager
def _task_errors(task: TaskName, problem: str) -> Iterator[None]:
    """While open, an error of another package becomes a `DataError` that names the task and the problem."""
    try:
        yield
    except FreeMoEError:
        raise
    except Exception as error:
        raise DataError(f"Task {task.spec!r}: {problem} ({_error_line(error)}).") from error


def _error_line(error: Exception) -> str:
    """An error of another package in one line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first[:300]}"
