"""The systems, one row each: what `freemoe.load` and the commands need of a system's artefacts.

A further system is a folder of its own and a row here. A row names functions by dotted path, and nothing is imported before it is
called, so that help stays quick.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freemoe.core.artifacts import MANIFEST, read_manifest
from freemoe.core.errors import ArtifactError
from freemoe.core.registry import Registry
from freemoe.hub.fetch import HubAccess, fetch_artefact
from freemoe.results import BuildResult, ConvertResult, RunResult, TrimResult

if TYPE_CHECKING:
    from freemoe.core.run.progress import Progress
    from freemoe.evals.engine.answering import LoadedArtifact
    from freemoe.evals.evaluation import EvalTarget
    from freemoe.models.checkpoints.placement import Placement
    from freemoe.recipes import EvalRecipe


@dataclass(frozen=True)
class ArtefactSystem:
    """One row.

    Attributes:
        result: Its typed result.
        load: Folder, base or None for the artefact's own, dtype, device, how the hub is asked -> something that answers.
        inspect: Folder, and a base to check it against or None -> what it holds, as plain data.
        tables: Result -> tables (`rich`) and lines for the terminal.
        page: Result -> its report as HTML.
        subject: Recipe of an evaluation -> what it is evaluated as.
        merge: Folder, name of an expert or several, output -> what was written, a plain checkpoint; ``dry=True`` only checks. Or why
            there is no plain checkpoint of such an artefact.
        own_text: Folder, base or None, dtype, device, threads, progress -> table and plain data of its own text's test part,
            measured again; None where an artefact has no text.
        own_text_plan: Folder, base or None -> what that would measure, as plain data.
    """

    result: type[RunResult]
    load: Callable[[Path, str | None, str, Placement, HubAccess], LoadedArtifact]
    inspect: Callable[[Path, str | None], dict[str, Any]]
    tables: Callable[[Any], tuple[list[Any], list[str]]]
    page: Callable[[Any], str]
    subject: Callable[[EvalRecipe], EvalTarget]
    merge: Callable[..., dict[str, Any]] | str
    own_text: Callable[..., tuple[Any, dict[str, Any]]] | None = None
    own_text_plan: Callable[[str, str | None], dict[str, Any]] | None = None


def _lazy_function(path: str) -> Callable[..., Any]:
    """The function ``module:name`` below this package, imported when it is called."""
    return lambda *args, **kwargs: pkgutil.resolve_name(f"freemoe.{path}")(*args, **kwargs)


SYSTEMS: Registry[ArtefactSystem] = Registry("kind of artefact")
"""By the ``kind`` in an artefact's manifest."""


def system_of(folder: str | Path) -> ArtefactSystem | None:
    """The system that wrote a folder; None where there is no manifest: a plain model, or nothing.

    Raises:
        ArtifactError: When the manifest cannot be read, or is of a kind that no row knows.
    """
    if not (Path(folder) / MANIFEST).is_file():
        return None
    kind = str(read_manifest(folder, check=False).get("kind"))
    if kind not in SYSTEMS:
        raise ArtifactError(
            f"{str(folder)!r} is an artefact of kind {kind!r}, which this freemoe does not know; it knows "
            f"{', '.join(SYSTEMS.names())}. Install the freemoe that wrote it."
        )
    return SYSTEMS.get(kind)


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
        return system.load(place, base, dtype, device, access)
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
    return (plain_model, artefact) if system is None else (system.subject, str(place))


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
    if isinstance(system.merge, str):
        raise ArtifactError(f"{str(artefact)!r} cannot be merged: {system.merge}")
    return system.merge(place, expert, output, dry=dry, **how)


def write_page(folder: Path) -> Path:
    """Write the report of an artefact, and return where it stands."""
    from freemoe.report.page import write_page as write

    return write(folder, lambda result: SYSTEMS.get(result.kind).page(result))


def _load_experts(folder: Path, base: str | None, dtype: str, device: Placement, access: HubAccess) -> LoadedArtifact:
    from freemoe.domain_experts.mixture import FreeMoE

    return FreeMoE.from_pretrained(base, folder, dtype=dtype, device=device, **access.for_base())


def _merge_experts(*what: Any, dry: bool, **how: Any) -> dict[str, Any]:
    from freemoe.domain_experts.merging import merge, plan_merge

    if dry:
        return plan_merge(*what, **{name: value for name, value in how.items() if name not in ("dtype", "device")})
    return merge(*what, **how)


def _load_converted(folder: Path, base: str | None, dtype: str, device: Placement, access: HubAccess) -> LoadedArtifact:
    from freemoe.evals.engine.answering import Answering
    from freemoe.models.checkpoints.loading import load_base
    from freemoe.models.checkpoints.placement import require_one_device

    if base is not None:
        raise ArtifactError(f"{str(folder)!r} is a whole model: it needs no base. Leave --base out.")
    read_manifest(folder)
    require_one_device(device, "A converted model")
    del access  # it is here already, and whole
    return Answering(*load_base(folder, None, dtype, device), ways={"converted": nullcontext}, folder=folder)


def _subject_of_conversion(recipe: EvalRecipe) -> EvalTarget:
    from freemoe.evals.evaluation import plain_model
    from freemoe.models.checkpoints.placement import require_one_device

    require_one_device(recipe.device, "A converted model")
    return plain_model(recipe)


def _load_trimmed(folder: Path, base: str | None, dtype: str, device: Placement, access: HubAccess) -> LoadedArtifact:
    from freemoe.evals.engine.answering import Answering
    from freemoe.hookmoe.adapter import load_trimmed

    model, tokenizer, trimmed = load_trimmed(folder, base, dtype, device, access)
    ways = {"trimmed": lambda: trimmed.attached(model, quick=True), "base": nullcontext}
    return Answering(model, tokenizer, ways, folder)


def _own_text_of_trim(*where: Any) -> tuple[Any, dict[str, Any]]:
    from freemoe.hookmoe.card import trim_table
    from freemoe.hookmoe.evaluation import evaluate_text
    from freemoe.report.tables import plain_table

    found = evaluate_text(*where)
    return plain_table(*trim_table(found["rows"])), found


SYSTEMS.add(
    "domain-experts",
    ArtefactSystem(
        result=BuildResult,
        load=_load_experts,
        inspect=_lazy_function("domain_experts.inspection:inspect_artefact"),
        tables=_lazy_function("report.experts:tables"),
        page=_lazy_function("report.experts:page"),
        subject=_lazy_function("domain_experts.prove.evaluation:experts_of"),
        merge=_merge_experts,
    ),
    "experts of domains behind a router, on a base (freemoe build, demo)",
)
SYSTEMS.add(
    "converted",
    ArtefactSystem(
        result=ConvertResult,
        load=_load_converted,
        inspect=_lazy_function("tomoe.inspection:inspect_converted"),
        tables=_lazy_function("report.conversion:tables"),
        page=_lazy_function("report.conversion:page"),
        subject=_subject_of_conversion,
        merge="it is a whole model already. Load its folder with transformers' from_pretrained(trust_remote_code=True).",
    ),
    "a dense model made a token-level mixture (freemoe convert)",
)
SYSTEMS.add(
    "trimmed-moe",
    ArtefactSystem(
        result=TrimResult,
        load=_load_trimmed,
        inspect=_lazy_function("hookmoe.inspection:inspect_trimmed"),
        tables=_lazy_function("report.trimmed:tables"),
        page=_lazy_function("report.trimmed:page"),
        subject=_lazy_function("hookmoe.evaluation:trimmed_of"),
        merge="no plain checkpoint can say how many experts a layer runs, nor hold hooks. Use freemoe.load, generate or eval.",
        own_text=_own_text_of_trim,
        own_text_plan=_lazy_function("hookmoe.evaluation:plan_evaluation"),
    ),
    "a mixture that runs fewer experts, with hooks (freemoe trim)",
)
