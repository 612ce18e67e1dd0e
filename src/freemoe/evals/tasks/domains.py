"""A domain: a name and its tasks, loaded into one reference split and one reported split.

A task is named by
``gsm8k`` (a benchmark of the table in `benchmarks`; ``gsm8k@5`` for five few-shot examples,
``mbpp+train`` to search on train too), ``lm_eval:sciq`` (any other task of lm-eval, see `harness.any_task`),
``FILE`` (carved; JSONL, JSON, CSV, TSV, parquet, or plain text), ``REFERENCE::TEST``, a folder with ``reference.jsonl`` and
``test.jsonl``, ``hf:owner/name:split`` (a data set), any of these after the shape its rows have (``chat:FILE``, ``text:FILE``;
recognised otherwise), ``demo:math`` (``code``, ``general``: the bundled benchmark), ``sampled:FILE`` (prompts with targets that
are answered as code tasks are, by samples, and reported as pass@k).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freemoe.assets import DOMAINS, benchmark_path
from freemoe.core.errors import DataError, RecipeError
from freemoe.core.registry import unknown_name
from freemoe.evals.sandbox.runner import Permission, require_permission
from freemoe.evals.tasks.benchmarks import BENCHMARKS
from freemoe.evals.tasks.documents import Document, ReferenceSplit, ReportedSplit, check_disjoint, join_splits
from freemoe.evals.tasks.task import DomainData, EvalTask, TaskGrader
from freemoe.evals.tasks.text_tasks import text_task
from freemoe.evals.tasks.user_tasks import FOLDER_FILES, ReadingOptions, SampledTask, UserTask
from freemoe.recipes import DomainRecipe
from freemoe.text.chat import as_prompt, uses_template
from freemoe.text.documents import split_shape
from freemoe.text.rows import HUB, SUFFIXES, is_rows, read_rows, source_name
from freemoe.text.shapes import detect_shape

DEMO = "demo:"
TEXT_SUFFIXES = (".txt", ".md")
LM_EVAL = "lm_eval:"
SAMPLED = "sampled:"
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
    """Whether a task spec names data of the user rather than a benchmark."""
    # A benchmark's name stays one in a folder that has a folder of that name.
    if re.split(r"[@+]", spec)[0] in BENCHMARKS or spec.startswith(LM_EVAL):
        return False
    shape, source = split_shape(spec.removeprefix(SAMPLED))
    return (
        shape is not None
        or source.startswith((DEMO, HUB))
        or PAIR in spec
        or "/" in spec
        or "\\" in spec
        or Path(spec).suffix.lower() in (*SUFFIXES, *TEXT_SUFFIXES)
        or Path(spec).is_dir()
    )


@dataclass(frozen=True)
class _DataSpec:
    """The user's data that a spec names: the shape that is asked for, one source or two."""

    shape: str | None
    first: str
    second: str | None


def _parse_data_spec(spec: str) -> _DataSpec:
    """What a spec names, files checked to be there and to be different."""
    if spec.startswith(DEMO):
        domain = spec.removeprefix(DEMO)
        if domain not in DOMAINS:
            raise unknown_name("domain of the bundled benchmark", domain, list(DOMAINS))
        return _DataSpec(None, *(str(benchmark_path(domain, part)) for part in ("reference", "test")))
    shape, rest = split_shape(spec)
    first, pair, second = rest.partition(PAIR)
    second = second.removeprefix(f"{shape}:")  # which may stand before both
    sources = [first, second] if pair else [first]
    if Path(first).expanduser().is_dir() and not pair and shape != "text":
        sources = [str(Path(first).expanduser() / name) for name in FOLDER_FILES]
    sources = [s if s.startswith(HUB) else str(Path(s).expanduser()) for s in sources]
    for source in sources:
        if not source.startswith(HUB) and not Path(source).is_file():
            raise DataError(
                f"Task {spec!r}: no file at {Path(source).absolute()}. Check the path; it is read from the current "
                f"folder ({Path.cwd()})."
            )
    if len({s if s.startswith(HUB) else str(Path(s).resolve()) for s in sources}) < len(sources):
        kind = "data set" if first.startswith(HUB) else "file"
        raise DataError(
            f"Task {spec!r}: reference and reported are the same {kind} {sources[0]}. What is searched "
            "on cannot be reported on; name one file alone and it is carved in two."
        )
    return _DataSpec(shape, sources[0], sources[1] if len(sources) > 1 else None)


def make_task(
    spec: str,
    *,
    tokenizer: Any = None,
    data_root: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    num_fewshot: int | None = None,
    allow_code_execution: Permission = False,
    text_given: int = 0,
    chat: str = "auto",
    task_folder: str | None = None,
    pass_at: int = 1,
    estimator: str = "unbiased",
    group_by: str | None = None,
) -> EvalTask:
    """Build the task that a spec names; arguments as in `load_domain`."""
    if spec.startswith(LM_EVAL):
        from freemoe.evals.tasks.harness.any_task import any_task

        return any_task(spec, folder=task_folder, limit=limit, seed=seed, num_fewshot=num_fewshot)
    if not is_file_spec(spec):
        from freemoe.evals.tasks.harness.tasks import named_task

        return named_task(
            spec,
            tokenizer=tokenizer,
            data_root=data_root,
            limit=limit,
            seed=seed,
            num_fewshot=num_fewshot,
            allow_code_execution=allow_code_execution,
            pass_at=pass_at,
            estimator=estimator,
        )
    sampled, spec = spec.startswith(SAMPLED), spec.removeprefix(SAMPLED)
    data = _parse_data_spec(spec)
    name = source_name(data.first)
    if spec.startswith(DEMO):
        name = spec.removeprefix(DEMO)
    elif Path(data.first).name == FOLDER_FILES[0] and Path(data.first).parent.name:
        name = Path(data.first).parent.name
    if (data.shape or _source_shape(data.first)) == "text":
        return text_task(
            name, data.first, data.second, tokenizer=tokenizer, limit=limit, given=text_given, group_by=group_by
        )
    how = ReadingOptions(data.shape, tokenizer, chat, group_by)
    task = UserTask(name, data.first, data.second, limit=limit, seed=seed, how=how)
    return SampledTask(task, tokenizer, pass_at, estimator) if sampled else task


def _source_shape(source: str) -> str:
    """Name of the shape that a source has."""
    return detect_shape(read_rows(source, 1)[0]).name if is_rows(source) else "text"


def load_domain(
    name: str,
    specs: Sequence[str],
    *,
    tokenizer: Any = None,
    data_root: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    num_fewshot: int | None = None,
    allow_code_execution: Permission = False,
    text_given: int = 0,
    chat: str = "auto",
    task_folder: str | None = None,
    pass_at: int = 1,
    estimator: str = "unbiased",
    group_by: str | None = None,
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
        allow_code_execution: Let code tasks run generated programs when they grade; ``unsafe``: even without bubblewrap.
        text_given: Tokens at the start of a block of text that are context only; 0 for the beginning-of-text token.
        chat: ``auto``, ``on`` or ``off``: whether the tokenizer's chat template is used (`freemoe.text.chat`).
        task_folder: Folder of further lm-eval tasks (YAML files) for ``lm_eval:NAME``.
        pass_at: The k of the pass@k that code tasks report.
        estimator: ``unbiased``, or ``first`` (`passed_at`).
        group_by: Column of the user's rows that names what they come from; ``key`` if None.

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
        raise DataError(f"No folder at {Path(data_root).expanduser().absolute()} (--data-root). Check the path.")
    tasks: dict[str, EvalTask] = {}
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
            chat=chat,
            task_folder=task_folder,
            pass_at=pass_at,
            estimator=estimator,
            group_by=group_by,
        )
        if task.name in tasks:
            raise DataError(
                f"Domain {name!r}: two of its tasks are called {task.name!r} (last: {spec!r}). Rename a "
                "file: a task is called by its file's stem."
            )
        tasks[task.name] = task
    return join_tasks(name, tasks, _as_message(tokenizer) if uses_template(tokenizer, chat, False) else None)


def _as_message(tokenizer: Any) -> Callable[[Document], Document]:
    """Makes a prompt with all its few-shot examples one message of the user, as lm-eval's chat templates do.

    What a conversation or a text is, is left alone: it has its template already, or none.
    """

    def to_message(document: Document) -> Document:
        if document.kind == "text":
            return document
        where = f"{document.task} {document.id}"
        prompt, *contexts = (
            as_prompt(tokenizer, [{"role": "user", "content": text}], where)
            for text in (document.prompt, *document.contexts)
        )
        answers = tuple(answer.removeprefix(" ") for answer in document.answers)
        reference = document.reference.removeprefix(" ")
        return replace(document, prompt=prompt, contexts=tuple(contexts), answers=answers, reference=reference)

    return to_message


def domain_of(recipe: DomainRecipe, name: str, tokenizer: Any) -> DomainData:
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
        chat=recipe.data.chat,
        task_folder=recipe.data.task_folder,
        pass_at=recipe.data.pass_at,
        estimator=recipe.data.estimator,
        group_by=recipe.data.group_by,
    )


def join_tasks(
    name: str, tasks: dict[str, EvalTask], change: Callable[[Document], Document] | None = None
) -> DomainData:
    """Pool tasks into one domain, with the two splits kept apart across tasks too.

    Args:
        name: Of the domain.
        tasks: By name.
        change: How every document is put otherwise than its task puts it.
    """
    reference: dict[tuple[str, str], Document] = {}
    reported: dict[tuple[str, str], Document] = {}
    graders: dict[str, EvalTask] = dict(tasks)
    for task in tasks.values():
        # A task without a reference split of its own borrows another's documents, which that one grades.
        lender = getattr(task, "lender", None)
        if lender is not None:
            graders.setdefault(lender.name, lender)
        for side, documents in ((reference, task.reference()), (reported, task.reported())):
            for document in documents:
                side.setdefault((document.task, document.id), change(document) if change else document)
    given = ReferenceSplit(tuple(reference.values()), name)
    closed = ReportedSplit(tuple(reported.values()), name)
    kept, closed = check_disjoint(name, given, closed)
    notes = [task.note for task in tasks.values()]
    if change and any(d.kind != "text" for d in given.documents):
        notes.append(f"{name}: prompts are one message of the user, by the model's chat template")
    if len(kept) < len(given):
        notes.append(f"{name}: {len(given) - len(kept)} reference documents dropped, as they are reported on too")
    return DomainData(
        name,
        kept,
        closed,
        tuple(notes),
        {n: TaskGrader(t.name, t.metric, t.grade) for n, t in graders.items()},
        bool(change) or any(getattr(task, "chat", False) for task in tasks.values()),
    )


def load_domains(recipe: DomainRecipe, tokenizer: Any) -> dict[str, DomainData]:
    """Load every domain of a recipe; a domain of text cannot hold questions too.

    Raises:
        DataError: When a domain mixes text with tasks, or its documents are missing.
        SandboxError: When grading would run generated code and that is not allowed.
    """
    domains = {}
    for name in recipe.domains:
        data = domain_of(recipe, name, tokenizer)
        kinds = list(dict.fromkeys([*(d.kind for d in data.reference.documents), *data.reported.document_kinds()]))
        if "code" in kinds:
            require_permission(recipe.data.allow_code_execution)
        if "text" in kinds and len(kinds) > 1:
            raise DataError(
                f"Domain {name!r} mixes plain text with tasks; their figures differ. Make them two domains."
            )
        domains[name] = data
    return _separate_domains(domains)


def _separate_domains(domains: dict[str, DomainData]) -> dict[str, DomainData]:
    """Drop reference documents that another domain reports on: the router is trained on all domains together."""
    references, reported = join_splits([d.reference for d in domains.values()], [d.reported for d in domains.values()])
    found = {}
    for (name, data), kept, closed in zip(domains.items(), references, reported, strict=True):
        dropped = len(data.reference) - len(kept)
        if not len(kept):
            raise DataError(f"Domain {name!r}: other domains report on all of its {dropped} reference documents.")
        notes = (
            *data.notes,
            *([f"{dropped} reference documents dropped: another domain reports on them"] if dropped else []),
        )
        found[name] = replace(data, reference=kept, reported=closed, notes=notes)
    return found
