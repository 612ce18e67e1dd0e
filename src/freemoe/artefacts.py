"""What is done with any artefact, whichever system made it: open it, score it, merge it, write its page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freemoe.core.artifacts import MANIFEST, read_manifest
from freemoe.core.errors import ArtifactError
from freemoe.hub.fetch import HubAccess, fetch_artefact
from freemoe.systems import SYSTEMS, system_of

if TYPE_CHECKING:
    from freemoe.core.run.progress import Progress
    from freemoe.evals.engine.answering import LoadedArtifact
    from freemoe.evals.evaluation import EvalTarget
    from freemoe.models.checkpoints.placement import Placement
    from freemoe.recipes import EvalRecipe


def load(
    folder: str | Path,
    base: str | None = None,
    *,
    dtype: str = "auto",
    device: Placement = "auto",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> LoadedArtifact:
    """Open any artefact, or a plain model.

    Args:
        folder: Written by ``freemoe build``, ``demo``, ``convert`` or ``trim``; a model folder, a GGUF file, or a repository
            ``owner/name`` of the hub, of either.
        base: The base that it is put on; the artefact's own if absent.
        dtype: Of the base.
        device: Where to load it.
        revision: Branch, tag or commit of the repository.
        token: For what is private, artefact or base.
        cache_dir: Where what is fetched is kept.
        local_files_only: Look into that cache only.

    Returns:
        ``model``, ``tokenizer``, ``generate_text``, ``save_pretrained`` and ``push_to_hub``; for domain experts a `FreeMoE`.

    Raises:
        ArtifactError: When the artefact is damaged, of an unknown kind, or made for another base.
        DataError: When there is no such model.
    """
    access = HubAccess(revision, token, cache_dir, local_files_only)
    place = fetch_artefact(folder, access)
    system = system_of(place)
    if system is not None:
        return system.part("artefact:load_artefact")(place, base, dtype, device, access)
    if base is not None:
        raise ArtifactError(f"{str(folder)!r} is no artefact that could be put on a base: it has no {MANIFEST}.")
    if place.is_dir() and not (place / "config.json").is_file():
        read_manifest(place)  # which says what is missing
    from freemoe.evals.engine.answering import Answering
    from freemoe.models.checkpoints.loading import load_base

    return Answering(*load_base(folder, revision, dtype, device, access))


def evaluate(recipe: EvalRecipe, *, progress: Progress | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Score tasks' reported splits under any artefact, or a plain model.

    Args:
        recipe: What to score, and on what.
        progress: Where to report.
        overwrite: Replace output files that are there: the result, and its page beside it.

    Returns:
        Per domain a row per expert (or what else the artefact can be run as) and the scores of every document; differences are
        paired, and to the base. What the artefact's making saw is set aside and counted.

    Raises:
        FreeMoEError: Its child that says what is wrong.
    """
    from freemoe.evals.evaluation import evaluate_target as evaluate_as
    from freemoe.report.evaluation import page, page_of, require_page_place
    from freemoe.report.page import write_page as write

    if recipe.output:
        require_page_place(page_of(recipe.output), overwrite)
    subject, place = _subject_at(recipe.artefact)
    work = f"{__name__}:{score_elsewhere.__name__}"
    result = evaluate_as(recipe, subject, place=place, work=work, progress=progress, overwrite=overwrite)
    if recipe.output:
        report = write(recipe.output, page, page_of(recipe.output))
        if progress is not None:
            progress.say(f"report: {report}")
    return result


def score_elsewhere(recipe: dict[str, Any], **what: Any) -> Any:
    """Score one domain in one way for an evaluation that another process makes (`freemoe.evals.evaluation.score_way`)."""
    from freemoe.evals.evaluation import score_way

    subject, place = _subject_at(recipe["artefact"])
    return score_way(recipe, subject, place, **what)


def _subject_at(artefact: str) -> tuple[Callable[[EvalRecipe], EvalTarget], str]:
    """What opens an artefact for an evaluation, and its folder; a plain model is opened by the name that it was given."""
    from freemoe.evals.evaluation import plain_model

    place = fetch_artefact(artefact)
    system = system_of(place)
    return (plain_model, artefact) if system is None else (system.part(system.eval_target), str(place))


def merge(
    artefact: str | Path, expert: str | Sequence[str], output: str | Path, *, dry: bool = False, **how: Any
) -> dict[str, Any]:
    """Write what an artefact makes of its base as a plain checkpoint that needs no freemoe.

    Args:
        artefact: Written by ``freemoe build`` or ``demo``; a folder, or a repository of the hub.
        expert: Which of its experts; or several, combined as ``op=`` says.
        output: Folder to write.
        dry: Only check the names, and say what would be written.
        how: See `domain_experts.merging.merge`.

    Raises:
        ArtifactError: There is no plain checkpoint of such an artefact; says what to use instead.
    """
    place = fetch_artefact(artefact, required=True)
    # Of what is no artefact the manifest's reader says what is missing.
    system = system_of(place) or SYSTEMS.get(read_manifest(place)["kind"])
    if system.merge is None:
        raise ArtifactError(f"{str(artefact)!r} cannot be merged: {system.no_merge}")
    return system.part(system.merge)(place, expert, output, dry=dry, **how)


def write_page(folder: Path) -> Path:
    """Write the report of an artefact, and return where it stands."""
    from freemoe.report.page import write_page as write

    return write(folder, lambda result: SYSTEMS.get(result.kind).part("report:page")(result))
