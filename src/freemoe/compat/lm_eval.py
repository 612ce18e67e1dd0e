"""What freemoe touches of lm-eval beside ``lm_eval.api``, which lm-eval documents for others. All of it is in 0.4.13.

Nothing of lm-eval is imported before a function here is called.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from freemoe.compat.names import attribute_of, attribute_replaced, missing_name_error, name_of, quiet_loggers
from freemoe.core.errors import DataError
from freemoe.core.untrusted import require_safe_yaml

_PACKAGE = "lm-eval"
_LOGGERS = ("lm_eval", "lm_eval.api.task", "lm_eval.tasks")  # warn of lm-eval's own configuration

CODE_MODULES = ("lm_eval.tasks.humaneval.utils", "lm_eval.tasks.mbpp.utils")
"""Modules of the code tasks, which load their metric while they are imported."""


def lm_eval_main() -> Callable[[], None]:
    """lm-eval's command line as a function; it reads ``sys.argv``."""
    return name_of(_PACKAGE, "lm_eval.__main__:cli_evaluate", "run lm-eval's command")


def official_config(yaml: str) -> dict[str, Any]:
    """lm-eval's own configuration of a task, as a dict; functions resolved.

    Raises:
        VersionError: The installed release reads its YAML elsewhere, or has no such task.
    """
    purpose = "ask and grade a benchmark as lm-eval does"
    load = name_of(_PACKAGE, "lm_eval.tasks._yaml_loader:load_yaml", purpose)
    path = Path(name_of(_PACKAGE, "lm_eval.tasks:__file__", purpose)).parent / yaml
    if not path.exists():
        raise missing_name_error(_PACKAGE, str(path), purpose)
    return load(path)


def task_of(config: dict[str, Any]) -> Any:
    """lm-eval's task object of one configuration; few-shot examples come in their order."""
    manager = name_of(_PACKAGE, "lm_eval.tasks:TaskManager", "make a task of a configuration")
    with quiet_loggers(*_LOGGERS):
        made = manager(include_defaults=False).load([config])["tasks"]
    task = next(iter(made.values())) if isinstance(made, dict) else made[0]
    task.set_fewshot_seed(0)
    return task


def filters_of(task: Any) -> list[Any]:
    """The chains of filters that a task sends a completion through, each of which is graded."""
    return attribute_of(task, "_filters", _PACKAGE, "grade a completion that it made itself")


@lru_cache(maxsize=256)
def _compile_template(source: str) -> Any:
    env = _template_env()
    return type(env).from_string(env, source)


def _template_env() -> Any:
    return name_of(_PACKAGE, "lm_eval.utils:env", "compile each prompt template once")


def templates_compiled_once() -> AbstractContextManager[None]:
    """Let lm-eval compile each prompt template once rather than once per document (most of its time)."""
    return attribute_replaced(vars(_template_env()), "from_string", _compile_template)


@contextmanager
def code_metric_replaced(metric: Any) -> Iterator[None]:
    """While open, lm-eval's code tasks get ``metric`` in the place of the one that they fetch from the hub at import.

    Afterwards everything is as it was, lm-eval's module cache included.
    """
    import evaluate

    load = evaluate.load

    def load_metric(path: str, *args: Any, **kwargs: Any) -> Any:
        return metric if path == "code_eval" else load(path, *args, **kwargs)

    cached = {name: sys.modules.pop(name) for name in CODE_MODULES if name in sys.modules}
    try:
        with attribute_replaced(evaluate.__dict__, "load", load_metric):
            yield
    finally:
        for name in CODE_MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(cached)


_FIND = "find a task of lm-eval's by its name"
# lm-eval's kinds of entries -> ours; a tag is a group that has no file.
_KINDS = {"TASK": "task", "PY_TASK": "class", "GROUP": "group", "TAG": "group"}


@dataclass(frozen=True)
class ListedTask:
    """What lm-eval's index has under a name."""

    name: str
    kind: str  # ``task`` (a YAML file), ``class`` (a task that is written in Python) or ``group``
    yaml: Path | None  # The file; None for a group that is none
    config: Mapping[str, Any]  # What the file says, functions by name only
    members: tuple[str, ...] = ()  # Names of a group's tasks


def find_task(name: str, folder: Path | None = None) -> ListedTask | None:
    """What lm-eval's index has under a name, a folder of the user's first; None for nothing.

    All of lm-eval's index takes most of ten seconds, so only the folder of the file that names it is indexed, if one does.

    Raises:
        DataError: A file that names it cannot be read.
        VersionError: The installed release has another index.
    """
    roots = _search_folders(folder)
    # A line that gives a task or a group this name.
    line = re.compile(rb"^(?:task|group):[ \t]*([\"']?)" + re.escape(name.encode()) + rb"\1[ \t]*(?:#.*)?\r?$", re.M)
    for root in roots:
        for file in sorted(root.rglob("*.yaml"), key=Path.as_posix):  # lm-eval's order
            if not line.search(file.read_bytes()):
                continue
            index = _task_index(file.parent)
            if name in index:
                return _to_listed_task(name, index)
            load = name_of(_PACKAGE, "lm_eval.tasks._yaml_loader:load_yaml", _FIND)
            try:  # lm-eval may leave a file out for reasons of its own
                load(file, resolve_func=False)
            except Exception as error:  # whatever its reader raises
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                raise DataError(f"{file} cannot be read as a task of lm-eval ({why}).") from None
    for root in roots:  # the tags have no file of their own
        if name in _task_index(root):
            return _to_listed_task(name, _task_index(root))
    return None


def known_tasks(folder: Path | None = None) -> list[str]:
    """Every name that `find_task` finds, those of the user's folder first."""
    roots = _search_folders(folder)
    return list(dict.fromkeys(name for root in roots for name in _task_index(root)))


def averaged_metrics(task: Any) -> dict[str, bool]:
    """Metrics of a task in lm-eval's order -> whether they are means over documents of which more is better."""
    mean = name_of(_PACKAGE, "lm_eval.api.registry:get_aggregation", "know how a metric is averaged")("mean")
    better = task.higher_is_better()
    return {name: how is mean and better.get(name) is not False for name, how in task.aggregation().items()}


def _search_folders(folder: Path | None) -> list[Path]:
    """Where tasks are looked for; the files of a user's folder are such that they can be read."""
    for file in sorted(folder.rglob("*.yaml")) if folder else ():
        require_safe_yaml(file)
    return [*([folder] if folder else []), _tasks_folder()]


def _tasks_folder() -> Path:
    return Path(name_of(_PACKAGE, "lm_eval.tasks:__file__", _FIND)).parent


def _task_index(root: Path) -> Mapping[str, Any]:
    """lm-eval's index of the files below a folder."""
    return _whole_index() if root == _tasks_folder() else _read_index(root)


@lru_cache(maxsize=1)
def _whole_index() -> Mapping[str, Any]:
    return _read_index(_tasks_folder())


def _read_index(root: Path) -> Mapping[str, Any]:
    manager = name_of(_PACKAGE, "lm_eval.tasks:TaskManager", _FIND)
    with quiet_loggers(*_LOGGERS):
        return attribute_of(manager(include_defaults=False, include_path=str(root)), "task_index", _PACKAGE, _FIND)


def _to_listed_task(name: str, index: Mapping[str, Any]) -> ListedTask:
    entry = index[name]
    kind = _KINDS.get(entry.kind.name, "class")
    members = tuple(dict.fromkeys(_group_members(name, index, set()))) if kind == "group" else ()
    return ListedTask(name, kind, entry.yaml_path, dict(entry.cfg or {}), members)


def _group_members(name: str, index: Mapping[str, Any], seen: set[str]) -> Iterator[str]:
    """Tasks of a group, those of the groups in it too."""
    if name in seen:
        return
    seen.add(name)
    entry = index.get(name)
    if entry is None or _KINDS.get(entry.kind.name) != "group":
        yield name
        return
    listed: list[Any] = sorted(entry.tags) if entry.cfg is None else entry.cfg.get("task") or []
    for item in [listed] if isinstance(listed, str) else listed:
        inner = item.get("task") if isinstance(item, dict) and "group" in item else None
        for child in inner if isinstance(inner, list) else [item]:
            called = (child.get("task") or child.get("group")) if isinstance(child, dict) else child
            yield from _group_members(str(called), index, seen)


def list_models() -> None:
    """Have lm-eval list its own models, which it does later only if its list is still empty."""
    name_of(_PACKAGE, "lm_eval.models", "stand beside lm-eval's own models")


def generation_settings(gen_kwargs: dict[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """What a request says about its generation, under one set of names: ``until``, ``max_gen_toks``, ``do_sample``, ..."""
    normalise = name_of(_PACKAGE, "lm_eval.models.utils:normalize_gen_kwargs", "read a request for a generation")
    return dict(normalise(gen_kwargs, max_gen_toks))


def stop_strings(until: Any, eos: str | None) -> list[str]:
    """The strings at which a generation ends, the end-of-text token among them."""
    handle = name_of(_PACKAGE, "lm_eval.models.utils:handle_stop_sequences", "know where a generation ends")
    return handle(until, eos)


def rolling_windows(tokens: list[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """A whole text as pairs of context and continuation, in which each token is predicted once."""
    purpose = "cut a text into windows as lm-eval does"
    roll = name_of(_PACKAGE, "lm_eval.utils:get_rolling_token_windows", purpose)
    disjoint = name_of(_PACKAGE, "lm_eval.utils:make_disjoint_window", purpose)
    return [disjoint(pair) for pair in roll(token_list=tokens, prefix_token=prefix, max_seq_len=length, context_len=1)]
