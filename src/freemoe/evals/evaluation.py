"""`evaluate_target`: score tasks' reported splits under everything that an artefact can be run as.

A system says what its artefact can be run as (a `EvalTarget`); documents, kept apart from what the making saw, scores, intervals and
the result are the same for all.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from freemoe.assets import BUNDLED, BUNDLED_MOE
from freemoe.core.artifacts import MANIFEST, tensor_checksums
from freemoe.core.environment import describe_environment, use_threads
from freemoe.core.errors import ArtifactError, DataError
from freemoe.core.files import json_digest, write_atomic
from freemoe.core.ledger import count_openings
from freemoe.core.registry import unknown_name
from freemoe.core.run.execute import identity_fields
from freemoe.core.run.lock import output_lock
from freemoe.core.run.places import executor_spec_of
from freemoe.core.run.progress import Progress, default_progress
from freemoe.core.run.units import Unit
from freemoe.core.version import __version__
from freemoe.distributed.executors import executor_of, require_place
from freemoe.evals.engine.answering import AUTO, BASE
from freemoe.evals.engine.evaluator import DocumentScore, Evaluator
from freemoe.evals.engine.sampling import sampling_of
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.guessing import against_guessing, vocabulary_of
from freemoe.evals.held_out import ProvenanceRecord, read_record, resolve_seed, set_aside
from freemoe.evals.summary import adjust_rows, average_rows, summarise_scores, two_sided_p
from freemoe.evals.tasks.documents import Document, FrozenChoice, digest_documents
from freemoe.evals.tasks.domains import load_domains
from freemoe.evals.tasks.task import DomainData
from freemoe.models.checkpoints.gguf_header import is_gguf
from freemoe.models.checkpoints.loading import load_base
from freemoe.recipes import EvalRecipe, recipe_from

KIND = "evaluation"  # Of the result

Row = Callable[[Evaluator, tuple[Document, ...]], tuple[Sequence[DocumentScore], Sequence[str]]]
"""Scores documents in one of the ways; also tells which expert each went to, or nothing where nobody routes."""


@dataclass(frozen=True, eq=False)
class EvalTarget:
    """What an evaluation is of."""

    model: Any
    tokenizer: Any
    rows: Mapping[str, Row]  # The ways to run it, by name; the others are compared with the first
    # By way: what a token costs there, as plain data; of those that say so
    costs: Mapping[str, dict[str, Any]] = field(default_factory=dict)


Open = Callable[[EvalRecipe], EvalTarget]


def make_variant(context: Callable[[], AbstractContextManager[Any]]) -> Row:
    """The row of a model inside a context."""

    def score_variant(
        evaluator: Evaluator, documents: tuple[Document, ...]
    ) -> tuple[Sequence[DocumentScore], Sequence[str]]:
        with context():
            return evaluator.score(documents), ()

    return score_variant


def only_known(recipe: EvalRecipe, known: Sequence[str]) -> None:
    """Check the experts that a recipe asks for, of something that has no router.

    Raises:
        UnknownNameError: An expert that there is not.
    """
    for expert in recipe.experts:
        if expert not in (BASE, AUTO, *known):
            raise unknown_name("expert", expert, [BASE, *known])


def require_plain(recipe: EvalRecipe) -> None:
    """Check that a recipe asks nothing of a plain model that it has not.

    Raises:
        UnknownNameError: An expert, or the router alone.
    """
    only_known(recipe, ())
    if AUTO in recipe.experts and BASE not in recipe.experts:
        raise unknown_name("expert", AUTO, [BASE], "A plain model has no router.")


def plain_model(recipe: EvalRecipe) -> EvalTarget:
    """A model as it is.

    Raises:
        ArtifactError: When there is neither an artefact nor a model.
        UnknownNameError: When an expert is asked for.
    """
    where = Path(recipe.artefact)
    bundled = recipe.artefact in (BUNDLED, BUNDLED_MOE)
    if not bundled and where.exists() and not (where / "config.json").is_file() and not is_gguf(recipe.artefact):
        raise ArtifactError(
            f"{recipe.artefact!r} is neither an artefact ({MANIFEST}) nor a model (a folder with config.json, or a GGUF)."
        )
    require_plain(recipe)
    return EvalTarget(*load_base(recipe.artefact, None, recipe.dtype, recipe.device), {BASE: make_variant(nullcontext)})


def require_result_place(path: Path, overwrite: bool) -> None:
    """Raise unless a result can be written at a path: before anything is scored.

    Raises:
        ArtifactError: There is no folder for it, or something stands there that may not be replaced: only an evaluation is, and only
            when asked.
    """
    if not path.absolute().parent.is_dir():
        raise ArtifactError(
            f"There is no folder {str(path.parent)!r} to write {path.name!r} into. Make it, or choose another -o."
        )
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise ArtifactError(f"{str(path)!r} exists already. Choose another -o, or --overwrite to replace it.")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or said.get("kind") != KIND or "freemoe" not in said:
        raise ArtifactError(
            f"{str(path)!r} is no result of freemoe eval, and nothing else is replaced. Choose another -o, or move it away."
        )


def evaluate_target(
    recipe: EvalRecipe,
    subject: Open = plain_model,
    *,
    place: str | Path | None = None,
    work: str | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Score documents in every way that a subject can be run; differences are paired, and to the first.

    ``recipe``: what to score, and on what. ``place``: folder of the artefact, where the recipe names a repository of the
    hub. ``work``: what scores one domain in one way elsewhere, where the recipe says so: the path of a function that opens
    the same subject and calls `score_way`. All is scored here if absent. Gives the result: per domain a row per way and
    every per-document score; documents that the artefact's making saw are set aside and counted.

    Raises:
        FreeMoEError: Its child that says what is wrong.
    """
    given = recipe, subject, str(place or recipe.artefact), work, progress or default_progress()
    if not recipe.output:
        return _run_evaluation(*given)
    output = Path(recipe.output)
    require_result_place(output, overwrite)
    with output_lock(output):
        # What another process may have written meanwhile.
        require_result_place(output, overwrite)
        result = _run_evaluation(*given)
        write_atomic(output, (json.dumps(result, indent=1) + "\n").encode())
    return result


def _run_evaluation(
    recipe: EvalRecipe, subject: Open, place: str, work: str | None, progress: Progress
) -> dict[str, Any]:
    use_threads(recipe.threads)
    record = read_record(place)
    recipe = resolve_seed(recipe, record)
    if record is not None and record.seen is None:
        progress.say(record.missing_record_warning())
    require_place(recipe)
    opened, domains = prepared = _prepare_evaluation(recipe, subject, place, record)
    tensors = tensor_checksums(place)
    # Of an artefact its tensors count, wherever it lies; of a plain model its name.
    opening = [tensors, identity_fields(recipe, "output", *(["artefact"] if tensors else []))]
    openings = count_openings((d.content_text() for domain in domains.values() for d in domain.documents), opening)
    for name, domain in domains.items():
        for note in domain.data.notes:
            progress.say(f"{name}: {note}")
    several = work is not None and executor_spec_of(recipe).is_parallel
    rows = (
        _score_domains_remotely(prepared, recipe, work or "", progress)
        if several
        else _score_domains(opened, domains, progress)
    )
    vocabulary = vocabulary_of(opened.model)
    found = [
        {
            "name": name,
            "set_aside": domain.set_aside,
            **_summarise_domain(domain, rows[name], vocabulary, recipe.seed or 0),
        }
        for name, domain in domains.items()
    ]
    adjust_rows(found)
    return {
        "format": 1,
        "kind": KIND,
        "freemoe": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": recipe.model_dump(mode="json"),
        "seen": None if record is None else record.as_json(),
        "domains": found,
        **({"average": mean} if (mean := average_rows(found)) else {}),
        **({"costs": dict(opened.costs)} if opened.costs else {}),
        "environment": describe_environment(),
        "cost": {"openings": openings},
    }


Scored = tuple[Sequence[DocumentScore], Sequence[str]]  # What a `Row` gives
Scores = dict[str, Scored]  # By way


@dataclass(frozen=True, eq=False)
class _PreparedDomain:
    """A domain before anything is scored."""

    data: DomainData
    set_aside: dict[str, Any]  # How many documents were, of how many, by what
    documents: tuple[Document, ...]  # To score
    evaluator: Evaluator


Prepared = tuple[EvalTarget, dict[str, _PreparedDomain]]


def _prepare_evaluation(recipe: EvalRecipe, subject: Open, place: str, record: ProvenanceRecord | None) -> Prepared:
    opened = subject(recipe.model_copy(update={"artefact": place}))
    domains = {name: set_aside(data, record) for name, data in load_domains(recipe, opened.tokenizer).items()}
    scorer = Scorer(opened.model, opened.tokenizer, batch_tokens=recipe.batch_tokens, overflow=recipe.data.overflow)
    sampling = sampling_of(recipe)
    # Nothing is chosen here, so the reported split may be read at once.
    choice = FrozenChoice(json_digest(recipe.model_dump(mode="json")))
    return opened, {
        name: _PreparedDomain(
            data, apart, data.reported.open(choice), Evaluator(scorer, data.graders, sampling=sampling)
        )
        for name, (data, apart) in domains.items()
    }


def _score_domains(opened: EvalTarget, domains: dict[str, _PreparedDomain], progress: Progress) -> dict[str, Scores]:
    """Every domain in every way, here."""
    found: dict[str, Scores] = {}
    for name, domain in domains.items():
        found[name] = {}
        with progress.stage(name, len(opened.rows)) as advance:
            for way, score in opened.rows.items():
                found[name][way] = score(domain.evaluator, domain.documents)
                advance(1)
    return found


def _score_domains_remotely(prepared: Prepared, recipe: EvalRecipe, work: str, progress: Progress) -> dict[str, Scores]:
    """Every domain in every way, each a unit of work."""
    opened, domains = prepared
    plain = recipe.model_dump(mode="json")
    units = [
        Unit(
            f"{name}|{way}",
            work,
            {"recipe": plain, "domain": name, "way": way, "documents": digest_documents(domain.documents)},
        )
        for name, domain in domains.items()
        for way in opened.rows
    ]
    scored: dict[str, Scored] = {}
    with executor_of(recipe) as executor, progress.stage("scores", len(units)) as advance:
        for unit, found in executor.run(units):
            scored[unit.name] = found
            advance(1)
    return {name: {way: scored[f"{name}|{way}"] for way in opened.rows} for name in domains}


def score_way(recipe: dict[str, Any], subject: Open, place: str, domain: str, way: str, documents: str) -> Scored:
    """Score a domain's documents in one way, for an evaluation that another process makes.

    ``documents``: digest of the documents, which must be the same here.

    Raises:
        DataError: When they are not.
    """
    opened, domains = _prepare_once(json.dumps(recipe), subject, place)
    own = domains[domain]
    if digest_documents(own.documents) != documents:
        raise DataError(
            f"A worker found other documents for {domain!r} than the evaluation itself: its files differ. Put the same ones on "
            "every machine."
        )
    return opened.rows[way](own.evaluator, own.documents)


@functools.lru_cache(maxsize=1)
def _prepare_once(recipe: str, subject: Open, place: str) -> Prepared:
    """The evaluation of this process, whose base is loaded once."""
    read = recipe_from(json.loads(recipe))
    assert isinstance(read, EvalRecipe)
    use_threads(read.threads)
    return _prepare_evaluation(read, subject, place, read_record(place))


def _summarise_domain(domain: _PreparedDomain, scored: Scores, vocabulary: int, seed: int) -> dict[str, Any]:
    """What is told of a domain."""
    documents = domain.documents
    rows = {way: scores for way, (scores, _) in scored.items()}
    routed: Sequence[str] = next((went for _, went in reversed(list(scored.values())) if went), ())
    first, base = next(iter(rows.items()))
    table = {way: summarise_scores(scores, base, documents) for way, scores in rows.items()}
    for way, row in table.items():
        if way != first:
            row["p"] = two_sided_p(rows[way], base, documents, seed)
    guessing = against_guessing(documents, [s.value for s in base], table[first]["score"], vocabulary)
    return {
        "notes": list(domain.data.notes),
        "unit": "perplexity" if documents[0].kind == "text" else "points",
        "rows": table,
        **({"guessing": guessing} if guessing else {}),
        "documents": [
            {
                "id": f"{d.task}/{d.id}",
                "key": d.key,
                **({"routed_to": routed[i]} if routed else {}),
                **{way: scores[i].value for way, scores in rows.items()},
            }
            for i, d in enumerate(documents)
        ],
    }
