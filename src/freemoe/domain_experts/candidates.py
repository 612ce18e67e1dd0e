"""The candidates of every subdomain on their way through a build: made, fitted, searched, chosen, made experts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from freemoe.core.errors import NumericError, RecipeError
from freemoe.core.run.folder import RunFolder
from freemoe.domain_experts.ahead import ParallelBuildStages
from freemoe.domain_experts.context import BuildContext
from freemoe.domain_experts.expert import DomainExpert, band_expert, switch_expert, unit_expert
from freemoe.domain_experts.purify.greedy import OnRound, PurifyResult, PurifyTask, from_state, to_state
from freemoe.domain_experts.purify.methods import method_of
from freemoe.domain_experts.rank.bands import Band, BandRankings, band_grid
from freemoe.domain_experts.rank.calibrate import InputNorms
from freemoe.domain_experts.rank.importance import METRICS
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.domain_experts.route.subdomains import DomainDivision
from freemoe.domain_experts.select.choice import (
    CandidateVerdict,
    accept_candidate,
    adjust_verdicts,
    judge_fitted,
    judge_winner,
    split_by_share,
)
from freemoe.domain_experts.select.scores import ScoreTable
from freemoe.domain_experts.structured.fitting import UNITS, FoundUnits, fit_units, multiple_of
from freemoe.domain_experts.structured.units import find_units, numbers_off
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.summary import is_text
from freemoe.evals.tasks.documents import ReferenceSplit
from freemoe.models.mask import Mask
from freemoe.recipes.expert_names import BASE

SALIENCY = "saliency"

_TITLES = {"purify": "signed purification", "units": "structured purification"}


Candidate = Band | PurifyResult | FoundUnits
"""What competes in a subdomain beside the base: a band of weights, single switches, or whole units."""


@dataclass(frozen=True, eq=False)
class Subdomain:
    """One subdomain of a build."""

    name: str  # ``DOMAIN/...``
    domain: str
    split: ReferenceSplit  # Its reference documents
    # Numbers of the documents that give signed purification its gradients, that stop it, and that do neither and
    # guard its choice
    parts: tuple[list[int], list[int], list[int]]
    rankings: BandRankings  # Makes the bands' masks
    candidates: Mapping[str, Candidate]  # By name: what was fitted so far, then the bands

    @property
    def guard_indices(self) -> list[int]:
        """Numbers of the documents that neither gave gradients nor stopped."""
        return self.parts[2]

    @property
    def bands(self) -> dict[str, Band]:
        """The bands among the candidates."""
        return {name: found for name, found in self.candidates.items() if isinstance(found, Band)}

    @property
    def switches(self) -> PurifyResult | None:
        """What signed purification found, once it is done."""
        found = self.candidates.get(SALIENCY)
        return found if isinstance(found, PurifyResult) else None

    @property
    def units(self) -> FoundUnits | None:
        """What structured purification found, once it is done."""
        found = self.candidates.get(UNITS)
        return found if isinstance(found, FoundUnits) else None

    @property
    def stopping_losses(self) -> tuple[float, ...]:
        """The stopping loss over the rounds of what was fitted; empty where nothing was."""
        if self.units is not None:
            return self.units.stopping_losses
        return self.switches.losses if self.switches is not None else ()

    def with_candidate(self, name: str, candidate: Candidate) -> Subdomain:
        """The same with one more candidate."""
        return replace(self, candidates={name: candidate, **self.candidates})

    def candidate_mask(self, name: str) -> Mask:
        """Weights that a candidate, or the base, switches off."""
        if name == BASE:
            return Mask()
        found = self.candidates[name]
        if isinstance(found, PurifyResult):
            return found.mask
        return found.mask() if isinstance(found, FoundUnits) else self.rankings.mask_of_band(found)


@dataclass(frozen=True, eq=False)
class SubdomainChoice:
    """What the search came to in a subdomain."""

    subdomain: Subdomain  # With all its candidates
    verdicts: tuple[CandidateVerdict, ...]  # What each metric's winner showed
    accepted: CandidateVerdict | None  # The chosen one, or None: the base


def make_subdomains(
    context: BuildContext, divided: dict[str, DomainDivision], norms: InputNorms | None = None
) -> list[Subdomain]:
    """List every subdomain with the bands that compete for it and with the parts of its documents."""
    recipe, found = context.recipe, []
    bands = {
        band.name: band
        for metric in recipe.search.metrics
        if METRICS.get(metric).needs != "gradients"
        for band in band_grid(recipe.bands, metric, recipe.seed)
    }
    shared = [recipe.saliency.gradient_share, recipe.saliency.stop_share]
    for domain, part in divided.items():
        for k, name in enumerate(part.names):
            numbers = [i for i, label in enumerate(part.labels) if label == k]
            split = context.domains[domain].reference.select_indices(numbers)
            gradient, stop, guard = split_by_share([d.key for d in split.documents], shared, recipe.seed)
            norm = partial(norms.input_norm, group=len(found), p=float(recipe.bands.p)) if norms else None
            rankings = BandRankings(context.weights, norm, bands.values())
            found.append(Subdomain(name, domain, split, (gradient, stop, guard), rankings, bands))
    return found


def competing_methods(recipe: BuildRecipe) -> tuple[str, ...]:
    """What is tested in every subdomain: metrics, or units and the metrics beside them.

    Signed purification does not compete with units: it works inside what they leave.
    """
    metrics = recipe.search.metrics
    if recipe.units.unit is None:
        return metrics
    return (UNITS, *(m for m in metrics if m != SALIENCY))


def purify_all(
    context: BuildContext, run: RunFolder, subdomains: list[Subdomain], ahead: ParallelBuildStages | None = None
) -> list[Subdomain]:
    """Add what signed purification finds in every subdomain, each a journalled unit, done by those ahead if there are any.

    Raises:
        NumericError: When a loss or gradient is NaN or infinite; names the subdomain.
    """
    section = context.recipe.saliency
    if SALIENCY not in competing_methods(context.recipe):
        return subdomains
    text = {s.name: is_text(s.split.documents) for s in subdomains}
    methods = {s.name: method_of(section, text[s.name], context.weights) for s in subdomains}
    rounds = {name: method.rounds(section, text[name]) for name, method in methods.items()}

    def purify_subdomain(sub: Subdomain, task: PurifyTask) -> dict[str, Tensor]:
        return to_state(methods[sub.name].run(task, section))

    fitted = _fit_all(context, run, subdomains, ahead, "purify", rounds, purify_subdomain)
    return [
        sub.with_candidate(SALIENCY, from_state(found, context.weights))
        for sub, found in zip(subdomains, fitted, strict=True)
    ]


def shrink_all(
    context: BuildContext, run: RunFolder, subdomains: list[Subdomain], ahead: ParallelBuildStages | None = None
) -> list[Subdomain]:
    """Add what structured purification finds in every subdomain, each a journalled unit, done by those ahead if there are any.

    Raises:
        RecipeError: Shares of units that the layout cannot keep.
        NumericError: When a loss or gradient is NaN or infinite; names the subdomain.
    """
    recipe, section = context.recipe, context.recipe.units
    if section.unit is None:
        return subdomains
    if recipe.bands.layers is not None or recipe.bands.sublayers != "both":
        raise RecipeError(
            "Units are of the whole model: leave bands.layers and bands.sublayers (--layers, --sublayers) at their defaults "
            "with --unit."
        )
    units = find_units(context.model, section.unit)
    for share in section.off:
        numbers_off(units, share, section.layout, multiple_of(section, context.model.device))

    def fit_subdomain(sub: Subdomain, task: PurifyTask) -> dict[str, Tensor]:
        looks = itertools.count(1)
        counted = replace(task, on_round=lambda _, loss, off: task.on_round(next(looks), loss, off))
        return fit_units(counted, units, section, recipe.saliency, SALIENCY in recipe.search.metrics).to_tensors()

    looks = dict.fromkeys([s.name for s in subdomains], len(section.off) * math.ceil(section.steps / section.every))
    fitted = _fit_all(context, run, subdomains, ahead, "units", looks, fit_subdomain)
    return [
        sub.with_candidate(UNITS, FoundUnits.from_tensors(units, context.weights, found))
        for sub, found in zip(subdomains, fitted, strict=True)
    ]


def _fit_all(
    context: BuildContext,
    run: RunFolder,
    subdomains: list[Subdomain],
    ahead: ParallelBuildStages | None,
    stage: Literal["purify", "units"],
    rounds: Mapping[str, int],
    fit: Callable[[Subdomain, PurifyTask], dict[str, Tensor]],
) -> list[dict[str, Tensor]]:
    """What is fitted in every subdomain, as the journal has it."""
    found = []
    # Rounds are the steps of the bar; a subdomain that ends early jumps to its end.
    with context.progress.stage(_TITLES[stage], sum(rounds.values())) as advance:
        waiting = [s.name for s in subdomains if not run.has_tensors(f"{stage}|{s.name}")]
        done = ahead.run_stage(stage, waiting, lambda name: advance(rounds[name])) if ahead else set()
        for sub in subdomains:
            seen = rounds[sub.name] if sub.name in done else 0

            def on_round(number: int, loss: float, off: float) -> None:
                nonlocal seen
                advance(number - seen)
                seen = number

            def fit_subdomain(sub: Subdomain = sub, on_round: OnRound = on_round) -> dict[str, Tensor]:
                documents = sub.split.documents
                gradient, stop = (context.make_batches([documents[i] for i in part]) for part in sub.parts[:2])
                task = PurifyTask(
                    context.model,
                    context.weights,
                    gradient,
                    stop,
                    is_text(documents),
                    context.recipe.seed,
                    on_round,
                    run.unit_state(f"{stage}|{sub.name}"),
                )
                try:
                    return fit(sub, task)
                except NumericError as error:
                    raise NumericError(
                        f"Subdomain {sub.name!r}: {error} The base model is as it was; subdomains done before are kept for "
                        "a run of the same recipe."
                    ) from None

            found.append(run.run_tensor_unit(f"{stage}|{sub.name}", fit_subdomain))
            advance(max(0, rounds[sub.name] - seen))
    return found


def search_subdomain(context: BuildContext, sub: Subdomain) -> tuple[list[CandidateVerdict], ScoreTable]:
    """Let every metric find its best candidate in a subdomain and test it; returns the scores that were asked for, too."""
    section, seed = context.recipe.search, context.recipe.seed

    def score_candidate(candidate: str, numbers: list[int]) -> list[DocumentScore]:
        documents = [sub.split.documents[i] for i in numbers]
        return context.score_documents(
            sub.domain, f"{sub.name}|{candidate}", partial(sub.candidate_mask, candidate), documents
        )

    table = ScoreTable(sub.split, score_candidate)
    verdicts = []
    for metric in competing_methods(context.recipe):
        if metric in (SALIENCY, UNITS):
            verdicts.append(judge_fitted(table, metric, sub.guard_indices, seed))
            continue
        names = [n for n, b in sub.bands.items() if b.metric == metric]
        verdicts.append(judge_winner(table, metric, names, section.method, section.objective, seed))
    sub.rankings.clear_cache()
    return verdicts, table


def choose_all(
    context: BuildContext, subdomains: Sequence[Subdomain], ahead: ParallelBuildStages | None = None
) -> list[SubdomainChoice]:
    """Search each metric's candidates, test the winners with the search counted, accept the proven."""
    section = context.recipe.search
    searched = []
    with context.progress.stage("search", len(subdomains)) as advance:
        names = [s.name for s in subdomains]
        done = ahead.run_stage("search", names, lambda name: advance(1)) if ahead else set()
        for sub in subdomains:
            searched.append(search_subdomain(context, sub))
            advance(0 if sub.name in done else 1)
    adjusted = adjust_verdicts([verdicts for verdicts, _ in searched])
    chosen = []
    for sub, verdicts, (_, table) in zip(subdomains, adjusted, searched, strict=True):
        if section.select == "guarded":
            accepted = accept_candidate(verdicts, section.alpha)
        else:
            # The papers' rule: the best on the documents that chose it, whether or not it beats the base (Algorithm 1).
            def selection_gain(v: CandidateVerdict, table: ScoreTable = table, sub: Subdomain = sub) -> float:
                seen = sub.guard_indices if v.candidate in (SALIENCY, UNITS) else range(len(sub.split))
                return table.mean_gain(v.candidate, seen, section.objective)

            accepted = max(verdicts, key=selection_gain)
        chosen.append(SubdomainChoice(sub, tuple(verdicts), accepted))
    return chosen


def make_expert(context: BuildContext, choice: SubdomainChoice) -> DomainExpert:
    """Turn a subdomain's choice into what is written to disk; a choice that switches nothing off is the base."""
    sub = choice.subdomain
    chosen = sub.candidates[choice.accepted.candidate] if choice.accepted else None
    if chosen is None:
        return DomainExpert(sub.name)
    if isinstance(chosen, PurifyResult):
        found = switch_expert(sub.name, chosen.mask)
    elif isinstance(chosen, FoundUnits):
        found = unit_expert(
            sub.name, chosen.units.kind, chosen.units.line_indices(chosen.best_point.off), chosen.singles
        )
    else:
        norm, ends = sub.rankings.norm, sub.rankings.band_ends(chosen)
        sub.rankings.clear_cache()
        held = {t: norm(t) for t in dict.fromkeys(w.tap for w in context.weights)} if norm is not None else {}
        found = band_expert(sub.name, chosen, ends, held, context.weights)
    return found if found.switches or found.lines or found.ends else DomainExpert(sub.name)
