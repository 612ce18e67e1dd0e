"""What freemoe touches of lm-eval beside ``lm_eval.api``, which lm-eval documents for others. All of it is in 0.4.13.

Nothing of lm-eval is imported before a function here is called.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from freemoe.compat.names import attribute_of, missing, name_of

_PACKAGE = "lm-eval"
_LOGGERS = ("lm_eval", "lm_eval.api.task", "lm_eval.tasks")

CODE_MODULES = ("lm_eval.tasks.humaneval.utils", "lm_eval.tasks.mbpp.utils")
"""Modules of the code tasks, which load their metric while they are imported."""


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Keep lm-eval's warnings about its own configuration away from our output; by default those of its tasks."""
    found = [logging.getLogger(name) for name in loggers or _LOGGERS]
    levels = [logger.level for logger in found]
    for logger in found:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(found, levels, strict=True):
            logger.setLevel(level)


def command() -> Callable[[], None]:
    """lm-eval's command line as a function; it reads ``sys.argv``."""
    return name_of(_PACKAGE, "lm_eval.__main__:cli_evaluate", "run lm-eval's command")


# ----------------------------------------------------------------------------------------- tasks


def official_config(yaml: str) -> dict[str, Any]:
    """lm-eval's own configuration of a task, as a dict; functions resolved.

    Args:
        yaml: The task's file, below the folder of all tasks.

    Raises:
        VersionError: The installed release reads its YAML elsewhere, or has no such task.
    """
    purpose = "ask and grade a benchmark as lm-eval does"
    load = name_of(_PACKAGE, "lm_eval.tasks._yaml_loader:load_yaml", purpose)
    path = Path(name_of(_PACKAGE, "lm_eval.tasks:__file__", purpose)).parent / yaml
    if not path.exists():
        raise missing(_PACKAGE, str(path), purpose)
    return load(path)


def task_of(config: dict[str, Any]) -> Any:
    """lm-eval's task object of one configuration; few-shot examples come in their order."""
    manager = name_of(_PACKAGE, "lm_eval.tasks:TaskManager", "make a task of a configuration")
    with quiet():
        made = manager(include_defaults=False).load([config])["tasks"]
    task = next(iter(made.values())) if isinstance(made, dict) else made[0]
    task.set_fewshot_seed(0)
    return task


def filters_of(task: Any) -> list[Any]:
    """The chains of filters that a task sends a completion through, each of which is graded."""
    return attribute_of(task, "_filters", _PACKAGE, "grade a completion that it made itself")


@lru_cache(maxsize=256)
def _compiled(source: str) -> Any:
    env = _templates()
    return type(env).from_string(env, source)


def _templates() -> Any:
    return name_of(_PACKAGE, "lm_eval.utils:env", "compile each prompt template once")


@contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Let lm-eval compile each prompt template once rather than once per document (most of its time)."""
    env = _templates()
    before = env.__dict__.get("from_string")
    env.__dict__["from_string"] = _compiled
    try:
        yield
    finally:
        del env.__dict__["from_string"]  # the method of the class is back
        if before is not None:
            env.__dict__["from_string"] = before


@contextmanager
def code_metric_replaced(metric: Any) -> Iterator[None]:
    """While open, lm-eval's code tasks get ``metric`` in the place of the one that they fetch from the hub at import.

    Afterwards everything is as it was, lm-eval's module cache included.
    """
    import evaluate

    load = evaluate.load

    def answer(path: str, *args: Any, **kwargs: Any) -> Any:
        return metric if path == "code_eval" else load(path, *args, **kwargs)

    cached = {name: sys.modules.pop(name, None) for name in CODE_MODULES}
    evaluate.load = answer
    try:
        yield
    finally:
        evaluate.load = load
        for name, module in cached.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


# ---------------------------------------------------------------------------------------- models


def list_models() -> None:
    """Have lm-eval list its own models, which it does later only if its list is still empty."""
    name_of(_PACKAGE, "lm_eval.models", "stand beside lm-eval's own models")


def generation_settings(asked: dict[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """What a request says about its generation, under one set of names: ``until``, ``max_gen_toks``, ``do_sample``, ..."""
    normalise = name_of(_PACKAGE, "lm_eval.models.utils:normalize_gen_kwargs", "read a request for a generation")
    return dict(normalise(asked, max_gen_toks))


def stop_strings(until: Any, eos: str | None) -> list[str]:
    """The strings at which a generation ends, the end-of-text token among them."""
    handle = name_of(_PACKAGE, "lm_eval.models.utils:handle_stop_sequences", "know where a generation ends")
    return handle(until, eos)


def rolling_windows(tokens: list[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """A whole text as pairs of context and continuation, in which each token is predicted once.

    Args:
        tokens: Of the text.
        prefix: The token that stands before it.
        length: Longest input.
    """
    purpose = "cut a text into windows as lm-eval does"
    roll = name_of(_PACKAGE, "lm_eval.utils:get_rolling_token_windows", purpose)
    disjoint = name_of(_PACKAGE, "lm_eval.utils:make_disjoint_window", purpose)
    return [disjoint(pair) for pair in roll(token_list=tokens, prefix_token=prefix, max_seq_len=length, context_len=1)]


def own_backend(model: Any, tokenizer: Any, **options: Any) -> Any:
    """lm-eval's own scorer over a loaded model: the rival of ours."""
    backend = name_of(_PACKAGE, "lm_eval.models.huggingface:HFLM", "be measured beside lm-eval's own scorer")
    with quiet("lm_eval.models.huggingface"):
        return backend(pretrained=model, tokenizer=tokenizer, **options)


def answers_of(backend: Any, requests: Sequence[Any]) -> list[tuple[float, bool]]:
    """What lm-eval's own scorer answers to requests that are tokens already: log-likelihood in nats, and whether greedy."""
    score = attribute_of(backend, "_loglikelihood_tokens", _PACKAGE, "measure both scorers on the same tokens")
    return score(requests, disable_tqdm=True)
