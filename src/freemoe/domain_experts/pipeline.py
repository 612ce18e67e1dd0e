"""`build`: from a recipe to proven experts.

Recipe -> domains -> subdomains -> calibration -> candidates -> guarded choice -> router -> artefact -> evidence: steps
1-7 of Free-MoE / MoDE, each in its own room; this file only puts them in order.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from freemoe.core.errors import NumericError
from freemoe.core.files import json_digest, write_atomic
from freemoe.core.run.execute import RunOutput, is_finished, open_run, publish_run
from freemoe.core.run.folder import RunFolder, RunPart
from freemoe.core.run.places import executor_spec_of
from freemoe.core.run.progress import Progress, QuietProgress, default_progress
from freemoe.distributed.executors import require_place
from freemoe.domain_experts.ahead import ParallelBuildStages, Stage
from freemoe.domain_experts.artefact import inspect_artefact
from freemoe.domain_experts.candidates import (
    Subdomain,
    SubdomainChoice,
    choose_all,
    make_expert,
    make_subdomains,
    purify_all,
    search_subdomain,
    shrink_all,
)
from freemoe.domain_experts.context import BuildContext, prepare_context
from freemoe.domain_experts.expert import DomainExpert
from freemoe.domain_experts.prove.card import model_card
from freemoe.domain_experts.prove.evidence import overall_gains
from freemoe.domain_experts.prove.power import check_division
from freemoe.domain_experts.prove.results import reported_evidence
from freemoe.domain_experts.rank.calibrate import Batch, InputNorms, calibrate, parts_of
from freemoe.domain_experts.rank.importance import METRICS
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.domain_experts.result import BuildResult
from freemoe.domain_experts.route.router import DomainRouter, train_on_subdomains
from freemoe.domain_experts.route.subdomains import DomainDivision, divide_domain, prompt_features
from freemoe.evals.held_out import keep_record
from freemoe.evals.keywords import resolve_recipe
from freemoe.evals.seen import SeenHashes
from freemoe.evals.tasks.documents import FrozenChoice, digest_documents
from freemoe.models.checkpoints.gguf_header import gguf_origin
from freemoe.models.checkpoints.identity import IDENTITY, SETTINGS
from freemoe.models.precision import compute_dtype, is_measured
from freemoe.recipes import recipe_from

# Batches of a calibration after which its sums are written down.
CALIBRATION_PART = 32


def build(
    recipe: BuildRecipe | None = None,
    *,
    progress: Progress | None = None,
    overwrite: bool = False,
    resume: bool = True,
    page: Callable[[Path], Any] | None = None,
    tokenizer: Any = None,
    **fields: Any,
) -> Path:
    """Find, prove and write the domain experts of a base.

    Instead of a recipe its fields can be given by keywords, a section as a mapping or its fields by their own names; ``model`` may
    then be a loaded model, and data may be in memory: it is written beside the run, as ``OUTPUT.data/NAME.jsonl``.

    Example:
        build(model=model, tokenizer=tokenizer, domains={"law": dataset}, metric="saliency", search={"alpha": 0.1}, output="experts")

    Args:
        recipe: What to build.
        progress: Where to report.
        overwrite: Replace a finished artefact of the same name.
        resume: Go on with an unfinished run of the same recipe.
        page: Draws a page into the folder that it is given, before that appears (`freemoe.artefacts.write_page`).
        tokenizer: Of a loaded model; the one beside its files if absent.
        fields: In place of the recipe.

    Returns:
        The artefact's folder.

    Raises:
        FreeMoEError: Its child that says what is wrong; no folder named like the output is left half written.
    """
    with resolve_recipe(BuildRecipe, recipe, fields, tokenizer, overwrite) as recipe:
        if resume and is_finished(recipe):
            return Path(recipe.output)
        with open_run(recipe, overwrite=overwrite, resume=resume) as run:
            output = _run_build(recipe, run, progress or default_progress())
            return publish_run(run, BuildResult, recipe, output, inspect_artefact, model_card, page)


@dataclass(frozen=True, eq=False)
class _PreparedBuild:
    """A build before anything is fitted."""

    context: BuildContext  # Base and data
    feature: dict[str, Tensor]  # Features of the reference documents, by domain
    divided: dict[str, DomainDivision]  # The domains' subdomains
    subdomains: list[Subdomain]  # All of them, with their bands

    def division_hash(self) -> str:
        """Hash of which documents are in which subdomain."""
        return json_digest({s.name: [d.id for d in s.split.documents] for s in self.subdomains})


@dataclass(frozen=True, eq=False)
class _SelectedExperts:
    """A build in which nothing is chosen any more."""

    choices: list[SubdomainChoice]  # One for every subdomain
    experts: list[DomainExpert]
    router: DomainRouter  # Trained on the reference documents
    routing: dict[str, Any]  # What there is to tell of it
    files: dict[str, bytes]  # What the artefact holds, by name

    def freeze_choice(self) -> FrozenChoice:
        """What opens the reported documents; asked for when the files are written."""
        return FrozenChoice(hashlib.sha256(self.files["experts.safetensors"]).hexdigest())


def _run_build(recipe: BuildRecipe, run: RunFolder, progress: Progress) -> RunOutput:
    require_place(recipe)
    prepared = _prepare_build(recipe, run, progress)
    context = prepared.context
    with contextlib.ExitStack() as stack:
        several = executor_spec_of(recipe).is_parallel
        ahead = (
            stack.enter_context(ParallelBuildStages(context.recipe, run, prepared.division_hash())) if several else None
        )
        selected = _select_experts(prepared, run, ahead)
        for name, blob in selected.files.items():
            write_atomic(run.partial / name, blob)
        # From here on nothing is chosen any more, so the reported documents may be opened.
        choice = selected.freeze_choice()
        reported = reported_evidence(
            context, prepared.divided, selected.choices, selected.experts, selected.router, choice, ahead
        )
    opened = [(data.reference.documents, data.reported.open(choice)) for data in context.domains.values()]
    seen = [SeenHashes.from_documents(reference, reported) for reference, reported in opened]
    return RunOutput(
        base_fingerprint=context.fingerprint,
        result={
            "base": {
                "name": context.recipe.model,
                "revision": context.recipe.revision,
                "origin": gguf_origin(context.recipe.model, context.recipe.dtype),
                "fingerprint": context.fingerprint,
                "model_type": context.model.config.model_type,
                "dtype": str(context.model.dtype).removeprefix("torch."),
                "parameters": sum(p.numel() for p in context.model.parameters()),
                "weights": sum(w.size for w in context.weights),
                "layers": 1 + max(w.layer for w in context.weights),
            },
            "domains": reported,
            "overall": overall_gains(reported),
            "router": selected.routing,
        },
        manifest={
            IDENTITY: context.identity,
            "experts": [e.manifest_entry() for e in selected.experts],
            "router": selected.router.describe(),
            "chat": any(data.chat for data in context.domains.values()),
        },
        # Features, calibration, search, guard and router read the reference documents of every domain.
        seen=keep_record(run.partial, functools.reduce(SeenHashes.union_with, seen)),
        reported=(d.content_text() for _, reported in opened for d in reported),
        cost={"artefact_bytes": sum(map(len, selected.files.values()))},
    )


def _prepare_build(recipe: BuildRecipe, run: RunFolder, progress: Progress) -> _PreparedBuild:
    context = prepare_context(recipe, progress)
    context.run = run
    run.require_same_inputs(_input_digests(context))
    context.recipe = recipe = _with_format(recipe, context.model, run)
    for data in context.domains.values():
        for note in data.notes:
            progress.say(f"{data.name}: {note}")
    feature = {name: _cached_features(context, run, name) for name in context.domains}
    divided = {
        name: divide_domain(name, data.reference, feature[name], recipe.subdomains, recipe.seed)
        for name, data in context.domains.items()
    }
    check_division(context, divided)
    normed = any(METRICS.get(m).needs == "norms" for m in recipe.search.metrics)
    norms = _calibrate_norms(context, run, divided) if normed else None
    return _PreparedBuild(context, feature, divided, make_subdomains(context, divided, norms))


def _with_format(recipe: BuildRecipe, model: Any, run: RunFolder) -> BuildRecipe:
    """The recipe with the number format of gradient passes settled for good: a process that goes on may measure otherwise."""
    if not is_measured(recipe.saliency.compute, model):
        return recipe

    def choose_compute() -> str:
        return "own" if compute_dtype("auto", model) is None else "bfloat16"

    compute = run.journal.run_unit("number format", choose_compute)
    return recipe.model_copy(update={"saliency": recipe.saliency.model_copy(update={"compute": compute})})


def _select_experts(
    prepared: _PreparedBuild, run: RunFolder, ahead: ParallelBuildStages | None = None
) -> _SelectedExperts:
    context, recipe = prepared.context, prepared.context.recipe
    subdomains = purify_all(context, run, prepared.subdomains, ahead)
    choices = choose_all(context, shrink_all(context, run, subdomains, ahead), ahead)
    experts = [make_expert(context, choice) for choice in choices]
    keys = {name: [d.key for d in context.domains[name].reference.documents] for name in prepared.divided}
    router, routing = train_on_subdomains(
        prepared.divided, prepared.feature, keys, recipe.router, kind=recipe.subdomains.feature, seed=recipe.seed
    )
    tensors = {
        "experts.safetensors": {k: v for e in experts for k, v in e.to_tensors().items()},
        "router.safetensors": router.to_tensors(),
    }
    return _SelectedExperts(choices, experts, router, routing, {name: save(held) for name, held in tensors.items()})


def work_ahead(recipe: dict[str, Any], output: str, division: str, stage: Stage, name: str) -> None:
    """Do a part of a build that another process makes (`ParallelBuildStages`), and leave it in its run folder.

    ``division`` is the hash of its subdomains' documents; ``name`` is that of the subdomain, or of the domain to report.

    Raises:
        FreeMoEError: What goes wrong in the build, or when this process does not find what that one found.
    """
    prepared = _prepared_once(json.dumps(recipe), output)
    context, run = prepared.context, RunPart(output, f"{stage}|{name}")
    context.run = run
    if prepared.division_hash() != division:
        raise _mismatch_error(output, "division into subdomains")
    if stage == "report":
        selected = _select_experts(prepared, run)
        # The choice is frozen when the first process has written it down, and then only.
        for file, blob in selected.files.items():
            if not (run.partial / file).is_file() or (run.partial / file).read_bytes() != blob:
                raise _mismatch_error(output, file)
        of_domain = {name: prepared.divided[name]}
        reported_evidence(
            context, of_domain, selected.choices, selected.experts, selected.router, selected.freeze_choice()
        )
        return
    own = [s for s in prepared.subdomains if s.name == name]
    if stage in ("purify", "search"):
        own = purify_all(context, run, own)
    if stage in ("units", "search"):
        own = shrink_all(context, run, own)
    if stage == "search":
        search_subdomain(context, own[0])


@functools.lru_cache(maxsize=1)
def _prepared_once(recipe: str, output: str) -> _PreparedBuild:
    """The build of this process, whose base is loaded once."""
    read = recipe_from(json.loads(recipe))
    assert isinstance(read, BuildRecipe)
    return _prepare_build(read, RunPart(output, "prepared"), QuietProgress())


def _mismatch_error(output: str, what: str) -> NumericError:
    return NumericError(
        f"A worker of the build of {output!r} found another {what} than the build itself: with other threads, sums differ in "
        "their last bits. Run the same command again with --on local --workers 1, or give every process the same --threads."
    )


def _input_digests(context: BuildContext) -> dict[str, Any]:
    """What the run reads; a resumed run must read the same base and documents."""
    return {
        "base model": context.fingerprint,
        SETTINGS: json_digest(context.identity),
        "reference documents": {n: digest_documents(d.reference.documents) for n, d in context.domains.items()},
        "reported documents": {n: d.reported.content_digest() for n, d in context.domains.items()},
        "tokens": {n: json_digest(context.answer_rows(d.reference.documents)) for n, d in context.domains.items()},
    }


def _cached_features(context: BuildContext, run: RunFolder, domain: str) -> Tensor:
    """Features of a domain's reference documents, kept in the run folder: ``(D, H)``."""

    def compute_features() -> dict[str, Tensor]:
        prompts = [context.scorer.prompt_ids(d) for d in context.domains[domain].reference.documents]
        return {"feature": prompt_features(context.model, prompts, context.recipe.subdomains.feature)}

    return run.run_tensor_unit(f"features|{domain}", compute_features)["feature"]


def _calibrate_norms(context: BuildContext, run: RunFolder, divided: dict[str, DomainDivision]) -> InputNorms:
    """One pass over all reference documents for all subdomains and all p; a killed one goes on at its last part."""
    documents, labels, groups = [], [], 0
    for name, part in divided.items():
        documents += context.domains[name].reference.documents
        labels += [groups + k for k in part.labels]
        groups += len(part.names)
    lengths = [len(ids) for ids, _ in context.answer_rows(documents)]
    parts = parts_of(lengths, CALIBRATION_PART * context.recipe.batch_tokens)

    with context.progress.stage("calibration", len(documents)) as advance:

        def calibration_batches(first: int, end: int) -> Iterator[Batch]:
            for part in parts[first:end]:
                for b in context.make_batches([documents[i] for i in part], [labels[i] for i in part]):
                    yield b.ids, b.mask, b.labels

        def unit_name(end: int) -> str:
            return f"calibration|{end}/{len(parts)}"

        kept = max((n for n in range(1, len(parts) + 1) if unit_name(n) in run.journal), default=0)
        advance(sum(map(len, parts[:kept])))
        norms, done = None, 0
        for end in range(max(1, kept), len(parts) + 1):

            def calibrate_part(
                first: int = done, end: int = end, before: InputNorms | None = norms
            ) -> dict[str, Tensor]:
                told = None if end == kept else advance
                return calibrate(
                    context.model, context.weights, calibration_batches(first, end), groups, told, before
                ).to_tensors()

            norms = InputNorms.from_tensors(run.run_tensor_unit(unit_name(end), calibrate_part))
            run.delete_tensors(unit_name(done))
            done = end
    assert norms is not None
    return norms
