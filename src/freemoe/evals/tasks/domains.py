"""A domain: a name and its tasks, loaded into one reference split and one reported split.

A task is named by
``gsm8k`` (a benchmark of the table in `benchmarks`; ``gsm8k@5`` for five few-shot examples, ``arc_easy:acc_norm`` for another of
its metrics, ``mbpp+train`` to search on train too), ``lm_eval:sciq`` (any other task of lm-eval, see `harness.any_task`),
``FILE`` (carved; JSONL, JSON, CSV, TSV, parquet, or plain text), ``REFERENCE::TEST``, a folder with ``reference.jsonl`` and
``test.jsonl``, ``hf:owner/name:split`` (a data set), any of these after the shape its rows have (``chat:FILE``, ``text:FILE``;
recognised otherwise), ``demo:math`` (``code``, ``general``: the bundled benchmark), ``sampled:FILE`` (prompts with targets that
are answered as code tasks are, by samples, and reported as pass@k).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from freemoe.assets import DOMAINS, SPLITS, benchmark_path
from freemoe.core.errors import DataError, RecipeError
from freemoe.core.registry import unknown_name
from freemoe.evals.sandbox.runner import require_permission
from freemoe.evals.tasks.benchmark import LM_EVAL, TaskName
from freemoe.evals.tasks.benchmarks import BENCHMARKS
from freemoe.evals.tasks.documents import Document, ReferenceSplit, ReportedSplit, check_disjoint, join_splits
from freemoe.evals.tasks.task import DomainData, EvalTask, TaskGrader
from freemoe.evals.tasks.text_tasks import TextTask
from freemoe.evals.tasks.user_tasks import FOLDER_FILES, SampledTask, UserTask
from freemoe.recipes import DataSection, DomainRecipe
from freemoe.text.chat import as_prompt, uses_template
from freemoe.text.documents import read_documents, split_shape
from freemoe.text.rows import HUB, SUFFIXES, is_rows, read_rows, source_name
from freemoe.text.shapes import detect_shape

DEMO = "demo:"
TEXT_SUFFIXES = (".txt", ".md")
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
    if re.split("[@+:]", spec)[0] in BENCHMARKS or spec.startswith(LM_EVAL):
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


def _parse_data_spec(spec: str) -> tuple[str | None, list[str]]:
    """The shape that a spec asks for and its one or two sources; files are checked to be there and to be different."""
    if spec.startswith(DEMO):
        domain = spec.removeprefix(DEMO)
        if domain not in DOMAINS:
            raise unknown_name("domain of the bundled benchmark", domain, list(DOMAINS))
        return None, [str(benchmark_path(domain, part)) for part in SPLITS]
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
    return shape, sources


def make_task(spec: str, data: DataSection | None = None, *, tokenizer: Any = None, seed: int = 0) -> EvalTask:
    """Build the task that a spec names; arguments as in `load_domain`."""
    data = data or DataSection()
    if spec.startswith(LM_EVAL):
        from freemoe.evals.tasks.harness.any_task import any_task

        return any_task(TaskName.parse(spec), data, seed)
    if not is_file_spec(spec):
        from freemoe.evals.tasks.harness.tasks import named_task

        return named_task(TaskName.parse(spec), data, tokenizer, seed)
    sampled, spec = spec.startswith(SAMPLED), spec.removeprefix(SAMPLED)
    shape, sources = _parse_data_spec(spec)
    first, second = sources[0], sources[1] if len(sources) > 1 else None
    name = source_name(first)
    if spec.startswith(DEMO):
        name = spec.removeprefix(DEMO)
    elif Path(first).name == FOLDER_FILES[0] and Path(first).parent.name:
        name = Path(first).parent.name
    if (shape or (detect_shape(read_rows(first, 1)[0]).name if is_rows(first) else "text")) == "text":
        about = first if second is None else f"reference {first}, reported {second}"
        texts = [read_documents(f"text:{source}", group_by=data.group_by) for source in sources]
        return TextTask(name, *texts, source=about, tokenizer=tokenizer, limit=data.limit, given=data.text_given)
    task = UserTask(name, first, second, data, tokenizer, seed, shape)
    return SampledTask(task) if sampled else task


def load_domain(
    name: str, specs: Sequence[str], data: DataSection | None = None, *, tokenizer: Any = None, seed: int = 0
) -> DomainData:
    """Load a domain's tasks into its two splits.

    ``specs``: its tasks, as `parse_domain` gives them. ``data``: where files lie and how they are read. Of ``limit``
    documents per task and split, which are drawn with ``seed``, balanced over fields and kept in file order, all are there
    if None; of a spec, ``task@N`` wins over ``fewshot``. ``tokenizer``: the model's; needed by text tasks alone.

    Raises:
        UnknownNameError: When no benchmark has that name.
        DataError: When files are missing or malformed, or the splits cannot be kept apart.
    """
    data = data or DataSection()
    if not specs:
        raise RecipeError(f"Domain {name!r} has no task; write {name}=TASK,TASK.")
    if data.root is not None and not Path(data.root).expanduser().is_dir():
        raise DataError(f"No folder at {Path(data.root).expanduser().absolute()} (--data-root). Check the path.")
    tasks: dict[str, EvalTask] = {}
    for spec in specs:
        task = make_task(spec, data, tokenizer=tokenizer, seed=seed)
        if task.name in tasks:
            raise DataError(
                f"Domain {name!r}: two of its tasks are called {task.name!r} (last: {spec!r}). Rename a "
                "file: a task is called by its file's stem."
            )
        tasks[task.name] = task
    return join_tasks(name, tasks, _as_message(tokenizer) if uses_template(tokenizer, data.chat, False) else None)


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


def join_tasks(
    name: str, tasks: dict[str, EvalTask], change: Callable[[Document], Document] | None = None
) -> DomainData:
    """Pool tasks into one domain, with the two splits kept apart across tasks too.

    ``change``: how every document is put otherwise than its task puts it.
    """
    reference: dict[tuple[str, str], Document] = {}
    reported: dict[tuple[str, str], Document] = {}
    graders: dict[str, EvalTask] = dict(tasks)
    for task in tasks.values():
        # A task without a reference split of its own borrows another's documents, which that one grades.
        if task.lender is not None:
            graders.setdefault(task.lender.name, task.lender)
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
        bool(change) or any(task.chat for task in tasks.values()),
    )


def load_domains(recipe: DomainRecipe, tokenizer: Any) -> dict[str, DomainData]:
    """Load every domain of a recipe; a domain of text cannot hold questions too.

    Raises:
        DataError: When a domain mixes text with tasks, or its documents are missing.
        SandboxError: When grading would run generated code and that is not allowed.
    """
    domains = {}
    for name, specs in recipe.domains.items():
        data = load_domain(name, specs, recipe.data, tokenizer=tokenizer, seed=recipe.seed or 0)
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
