"""A domain: a name and its tasks, loaded into one reference split and one reported split.

A task is named by
``gsm8k`` (a benchmark of the table in `benchmarks`; ``gsm8k@5`` for five few-shot examples,
``mbpp+train`` to search on train too),
``FILE.jsonl`` (carved), ``REF.jsonl::TEST.jsonl``, a folder with ``reference.jsonl`` and ``test.jsonl``,
``text:FILE`` or ``text:FILE::TESTFILE``, ``demo:math`` (``code``, ``general``: the bundled benchmark).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from freemoe.assets import DOMAINS, benchmark_path
from freemoe.core.errors import DataError, RecipeError
from freemoe.core.registry import unknown_name
from freemoe.evals.sandbox.runner import require_permission
from freemoe.evals.tasks.benchmarks import BENCHMARKS
from freemoe.evals.tasks.documents import Document, ReferenceSplit, ReportedSplit, check_disjoint
from freemoe.evals.tasks.task import DomainData, Grader, Task
from freemoe.evals.tasks.text_tasks import text_task
from freemoe.evals.tasks.user_tasks import FOLDER_FILES, UserTask
from freemoe.recipes import BuildRecipe, EvalRecipe

TEXT = "text:"
DEMO = "demo:"
PAIR = "::"


def parse_domain(text: str) -> tuple[str, tuple[str, ...]]:
    """Read ``name=task,task`` into the name and its task specs.

    Raises:
        RecipeError: When a part is missing or a task is named twice.
    """
    name, equals, rest = text.partition("=")
    specs = tuple(part.strip() for part in rest.split(","))
    if Path(rest.strip()).exists():  # a file whose name has a comma
        specs = (rest.strip(),)
    if not equals or not name.strip() or not all(specs):
        raise RecipeError(
            f"Domain {text!r} cannot be read; write NAME=TASK,TASK: e.g. math=gsm8k,mathqa or "
            "mine=FILE.jsonl or wiki=text:FILE."
        )
    if len(set(specs)) < len(specs):
        twice = next(s for s in specs if specs.count(s) > 1)
        raise RecipeError(f"Domain {name.strip()!r} names the task {twice!r} twice; name each once.")
    return name.strip(), specs


def is_file_spec(spec: str) -> bool:
    """Whether a task spec names files of the user rather than a benchmark."""
    # A benchmark's name stays one in a folder that has a folder of that name.
    if re.split(r"[@+]", spec)[0] in BENCHMARKS:
        return False
    return (
        spec.startswith((TEXT, DEMO))
        or PAIR in spec
        or "/" in spec
        or "\\" in spec
        or Path(spec).suffix.lower() in (".jsonl", ".json", ".txt")
        or Path(spec).is_dir()
    )


def _files(spec: str) -> tuple[Path, Path | None]:
    """The one or two files of a spec, checked to be there and to be different."""
    if spec.startswith(DEMO):
        domain = spec.removeprefix(DEMO)
        if domain not in DOMAINS:
            raise unknown_name("domain of the bundled benchmark", domain, list(DOMAINS))
        return benchmark_path(domain, "reference"), benchmark_path(domain, "test")
    first, pair, second = spec.removeprefix(TEXT).partition(PAIR)
    file = Path(first).expanduser()
    test = Path(second).expanduser() if pair else None
    if file.is_dir() and test is None and not spec.startswith(TEXT):
        file, test = (file / name for name in FOLDER_FILES)
    for path in (file, test):
        if path is not None and not path.is_file():
            raise DataError(
                f"Task {spec!r}: no file at {path.resolve()}. Check the path; it is read from the current "
                f"folder ({Path.cwd()})."
            )
    if test is not None and file.resolve() == test.resolve():
        raise DataError(
            f"Task {spec!r}: reference and reported are the same file {file.resolve()}. What is searched "
            "on cannot be reported on; name one file alone and it is carved in two."
        )
    return file, test


def make_task(
    spec: str,
    *,
    tokenizer: Any = None,
    data_root: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    num_fewshot: int | None = None,
    allow_code_execution: bool = False,
    text_given: int = 0,
) -> Task:
    """Build the task that a spec names; arguments as in `load_domain`."""
    if not is_file_spec(spec):
        from freemoe.evals.tasks.lm_eval_tasks import named_task

        return named_task(
            spec,
            tokenizer=tokenizer,
            data_root=data_root,
            limit=limit,
            seed=seed,
            num_fewshot=num_fewshot,
            allow_code_execution=allow_code_execution,
        )
    file, test = _files(spec)
    if spec.startswith(DEMO):
        return UserTask(spec.removeprefix(DEMO), file, test, limit=limit, seed=seed)
    name = file.parent.name if file.name == FOLDER_FILES[0] and file.parent.name else file.stem
    if spec.startswith(TEXT):
        return text_task(name, file, test, tokenizer=tokenizer, limit=limit, given=text_given)
    if file.suffix.lower() != ".jsonl":
        raise DataError(
            f"Task {spec!r}: a file of questions must be .jsonl, not {file.suffix or 'without suffix'!r}; "
            f"for plain text write text:{spec}."
        )
    return UserTask(name, file, test, limit=limit, seed=seed)


def load_domain(
    name: str,
    specs: Sequence[str],
    *,
    tokenizer: Any = None,
    data_root: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    num_fewshot: int | None = None,
    allow_code_execution: bool = False,
    text_given: int = 0,
) -> DomainData:
    """Load a domain's tasks into its two splits.

    Args:
        name: Name of the domain.
        specs: Its tasks, as `parse_domain` gives them.
        tokenizer: The model's; needed by text tasks alone.
        data_root: Folder of benchmark files in their original formats; None asks the hub.
        limit: Documents per task and split at most: drawn with ``seed``, balanced over fields, kept in file
            order.
        seed: Seed of carving and drawing.
        num_fewshot: Few-shot examples of every named benchmark; None for each one's own (``task@N`` wins).
        allow_code_execution: Let code tasks run generated programs when they grade.
        text_given: Tokens at the start of a block of text that are context only; 0 for the beginning-of-text token.

    Raises:
        UnknownNameError: When no benchmark has that name.
        DataError: When files are missing or malformed, or the splits cannot be kept apart.
    """
    if limit is not None and limit < 1:
        raise RecipeError(f"limit is {limit}; it must be at least 1 document, or left out for all.")
    if num_fewshot is not None and num_fewshot < 0:
        raise RecipeError(f"num_fewshot is {num_fewshot}; it must be 0 or more examples.")
    if not specs:
        raise RecipeError(f"Domain {name!r} has no task; write {name}=TASK,TASK.")
    if data_root is not None and not Path(data_root).expanduser().is_dir():
        raise DataError(f"No folder at {Path(data_root).expanduser().resolve()} (--data-root). Check the path.")
    tasks: dict[str, Task] = {}
    for spec in specs:
        task = make_task(
            spec,
            tokenizer=tokenizer,
            data_root=data_root,
            limit=limit,
            seed=seed,
            num_fewshot=num_fewshot,
            allow_code_execution=allow_code_execution,
            text_given=text_given,
        )
        if task.name in tasks:
            raise DataError(
                f"Domain {name!r}: two of its tasks are called {task.name!r} (last: {spec!r}). Rename a "
                "file: a task is called by its file's stem."
            )
        tasks[task.name] = task
    return join_tasks(name, tasks)


def domain_of(recipe: BuildRecipe | EvalRecipe, name: str, tokenizer: Any) -> DomainData:
    """Load one domain as a recipe says; errors as of `load_domain`."""
    return load_domain(
        name,
        recipe.domains[name],
        tokenizer=tokenizer,
        data_root=recipe.data.root,
        limit=recipe.data.limit,
        seed=recipe.seed or 0,
        num_fewshot=recipe.data.fewshot,
        allow_code_execution=recipe.data.allow_code_execution,
        text_given=recipe.data.text_given,
    )


def join_tasks(name: str, tasks: dict[str, Task]) -> DomainData:
    """Pool tasks into one domain, with the two splits kept apart across tasks too."""
    reference: dict[tuple[str, str], Document] = {}
    reported: dict[tuple[str, str], Document] = {}
    graders: dict[str, Task] = dict(tasks)
    for task in tasks.values():
        # A task without a reference split of its own borrows another's documents, which that one grades.
        lender = getattr(task, "lender", None)
        if lender is not None:
            graders.setdefault(lender.name, lender)
        for side, documents in ((reference, task.reference()), (reported, task.reported())):
            for document in documents:
                side.setdefault((document.task, document.id), document)
    given = ReferenceSplit(tuple(reference.values()), name)
    closed = ReportedSplit(tuple(reported.values()), name)
    kept = check_disjoint(name, given, closed)
    notes = [task.note for task in tasks.values()]
    if len(kept) < len(given):
        notes.append(f"{name}: {len(given) - len(kept)} reference documents dropped, as they are reported on too")
    return DomainData(
        name, kept, closed, tuple(notes), {n: Grader(t.name, t.metric, t.grade) for n, t in graders.items()}
    )


def load_domains(recipe: BuildRecipe | EvalRecipe, tokenizer: Any) -> dict[str, DomainData]:
    """Load every domain of a recipe; a domain of text cannot hold questions too.

    Raises:
        DataError: When a domain mixes text with tasks, or its documents are missing.
        SandboxError: When grading would run generated code and that is not allowed.
    """
    domains = {}
    for name in recipe.domains:
        data = domain_of(recipe, name, tokenizer)
        kinds = list(dict.fromkeys([*(d.kind for d in data.reference.documents), *data.reported.kinds()]))
        if "code" in kinds:
            require_permission(recipe.data.allow_code_execution)
        if "text" in kinds and len(kinds) > 1:
            raise DataError(
                f"Domain {name!r} mixes plain text with tasks; their figures differ. Make them two domains."
            )
        domains[name] = data
    return _apart(domains)


def _apart(domains: dict[str, DomainData]) -> dict[str, DomainData]:
    """Drop reference documents that another domain reports on: the router is trained on all domains together."""
    reported = {key for data in domains.values() for key in data.reported.keys()}  # noqa: SIM118
    found = {}
    for name, data in domains.items():
        kept = [i for i, d in enumerate(data.reference.documents) if d.key not in reported]
        dropped = len(data.reference) - len(kept)
        if not kept:
            raise DataError(f"Domain {name!r}: other domains report on all of its {dropped} reference documents.")
        notes = (
            *data.notes,
            *([f"{dropped} reference documents dropped: another domain reports on them"] if dropped else []),
        )
        found[name] = replace(data, reference=data.reference.take(kept), notes=notes)
    return found
