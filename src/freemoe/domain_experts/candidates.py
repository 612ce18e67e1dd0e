"""The candidates of every subdomain on their way through a build: made, fitted, searched, chosen, made experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from freemoe.core.errors import DataError, NumericError, RecipeError
from freemoe.core.numbers import format_decimals
from freemoe.core.run.folder import RunFolder
from freemoe.domain_experts.ahead import ParallelBuildStages, Stage
from freemoe.domain_experts.context import BuildContext
from freemoe.domain_experts.expert import DomainExpert, band_expert, switch_expert, unit_expert
from freemoe.domain_experts.purify.curvature import LossForecast
from freemoe.domain_experts.purify.greedy import OnRound, from_state, to_state
from freemoe.domain_experts.purify.methods import PurifyTask, method_of
from freemoe.domain_experts.rank.bands import Band, BandRankings, band_grid
from freemoe.domain_experts.rank.calibrate import InputNorms
from freemoe.domain_experts.rank.importance import METRICS
from freemoe.domain_experts.route.subdomains import DomainDivision
from freemoe.domain_experts.select.choice import (
    CandidateVerdict,
    accept_candidate,
    adjust_verdicts,
    judge_fitted,
    judge_winner,
    required_documents,
    split_by_share,
)
from freemoe.domain_experts.select.scores import ScoreTable
from freemoe.domain_experts.structured.fitting import UNITS, FoundUnits, fit_units, multiple_of
from freemoe.domain_experts.structured.training import OnLook
from freemoe.domain_experts.structured.units import find_units, numbers_off
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.statistics import detectable_effect, detectable_gain
from freemoe.evals.summary import is_text
from freemoe.evals.tasks.documents import ReferenceSplit
from freemoe.models.mask import Mask
from freemoe.recipes import BuildRecipe

SALIENCY = "saliency"


@dataclass(eq=False)
class SubdomainState:
    """One subdomain on its way through the build.

    Attributes:
        name: ``DOMAIN/...``.
        domain: Its domain.
        number: Its number over all domains: the group of the calibration.
        split: Its reference documents.
        bands: Candidates by name.
        rankings: Makes the bands' masks.
        parts: Numbers of the documents that give signed purification its gradients, that stop it, and that do neither
            and guard its choice.
        fitted: The candidate that signed purification found, or None.
        curve: The stopping loss over its rounds.
        units: What structured purification found, or None.
        forecast: What the base's gradient makes of that candidate on stopping documents, beside what it does there.
        verdicts: What each metric's winner showed.
        choice: The accepted one, or None.
    """

    name: str
    domain: str
    number: int
    split: ReferenceSplit
    bands: dict[str, Band]
    rankings: BandRankings
    parts: tuple[list[int], list[int], list[int]]
    fitted: Mask | None = None
    curve: tuple[float, ...] = ()
    units: FoundUnits | None = None
    forecast: LossForecast | None = None
    verdicts: tuple[CandidateVerdict, ...] = ()
    choice: CandidateVerdict | None = None

    @property
    def guard_indices(self) -> list[int]:
        """Numbers of the documents that neither gave gradients nor stopped."""
        return self.parts[2]

    def candidate_mask(self, candidate: str) -> Mask:
        """Weights that a candidate switches off."""
        if candidate == "base":
            return Mask()
        if candidate == SALIENCY:
            return self.fitted or Mask()
        if candidate == UNITS:
            return self.units.mask() if self.units else Mask()
        return self.rankings.mask_of_band(self.bands[candidate])


@dataclass(frozen=True)
class SubdomainDocuments:
    """Reference documents of a subdomain, and their numbers by what they are for: `SubdomainState.parts`."""

    name: str
    domain: str
    split: ReferenceSplit
    parts: tuple[list[int], list[int], list[int]]


def members_of(context: BuildContext, divided: dict[str, DomainDivision]) -> list[SubdomainDocuments]:
    """The documents of every subdomain, in parts."""
    recipe, found = context.recipe, []
    shared = [recipe.saliency.gradient_share, recipe.saliency.stop_share]
    for name, part in divided.items():
        for k, subdomain in enumerate(part.names):
            split = context.domains[name].reference.select_indices(
                [i for i, label in enumerate(part.labels) if label == k]
            )
            gradient, stop, guard = split_by_share([d.key for d in split.documents], shared, recipe.seed)
            found.append(SubdomainDocuments(subdomain, name, split, (gradient, stop, guard)))
    return found


def check_division(context: BuildContext, divided: dict[str, DomainDivision]) -> None:
    """Say what was merged and what cannot be proven, before anything is calibrated or searched.

    Raises:
        DataError: When documents are too few to purify, or to prove a gain in any subdomain.
    """
    for part in divided.values():
        for note in part.notes:
            context.progress.say(f"note: {note}")
    members, fitted = members_of(context, divided), {SALIENCY, UNITS} & set(competing_methods(context.recipe))
    for sub in members:
        if fitted and not all(sub.parts):
            raise DataError(
                f"Subdomain {sub.name!r} has {len(sub.split)} reference documents of "
                f"{len({d.key for d in sub.split.documents})} keys or groups: too few to give gradients, to stop and to guard. "
                "Raise --limit, use fewer subdomains (--subdomains), or group otherwise (--group-by)."
            )
    if context.recipe.search.select == "guarded":
        _say_what_can_be_proven(context, members)


def make_subdomains(
    context: BuildContext, divided: dict[str, DomainDivision], norms: InputNorms | None
) -> list[SubdomainState]:
    """List every subdomain with the bands that compete for it and with the parts of its documents."""
    found, recipe = [], context.recipe
    for number, sub in enumerate(members_of(context, divided)):
        bands = {
            b.name: b
            for m in recipe.search.metrics
            if METRICS.get(m).needs != "gradients"
            for b in band_grid(recipe.bands, m, recipe.seed)
        }
        norm = partial(norms.input_norm, group=number, p=float(recipe.bands.p)) if norms else None
        rankings = BandRankings(context.weights, norm, bands.values())
        found.append(SubdomainState(sub.name, sub.domain, number, sub.split, bands, rankings, sub.parts))
    return found


def competing_methods(recipe: BuildRecipe) -> tuple[str, ...]:
    """What is tested in every subdomain: metrics, or units and the metrics beside them.

    Signed purification does not compete with units: it works inside what they leave.
    """
    metrics = recipe.search.metrics
    if recipe.units.unit is None:
        return metrics
    return (UNITS, *(m for m in metrics if m != SALIENCY))


def _say_what_can_be_proven(context: BuildContext, subdomains: list[SubdomainDocuments]) -> None:
    """Say which gain the guard finds four times in five, and what would lower it; refuse where it could find none at all."""
    recipe, metrics = context.recipe, competing_methods(context.recipe)
    alpha, tests = recipe.search.alpha, len(metrics) * len(subdomains)
    said, hopeless = [], []
    for metric in metrics:
        fitted = metric in (SALIENCY, UNITS)
        guards = 1 - recipe.saliency.gradient_share - recipe.saliency.stop_share if fitted else 1.0
        bands = 1 if fitted else len(band_grid(recipe.bands, metric, recipe.seed))
        # A test that has all scores counts alike candidates as one, and unrelated ones each; another counts each.
        counted = (1, bands) if bands > 1 and recipe.search.method == "exhaustive" else (bands,)
        needed = required_documents(tests * counted[0], alpha)
        for domain, data in context.domains.items():
            counts = {
                s.name: len({s.split.documents[i].key for i in (s.parts[2] if fitted else range(len(s.split)))})
                for s in subdomains
                if s.domain == domain
            }
            hopeless += [
                f"{name}, {metric}: {count} different documents test it, and by itself no gain on so few can be proven at alpha {alpha} among "
                f"{tests} tests; {math.ceil(needed / guards)} reference documents would do"
                for name, count in counts.items()
                if count < needed
            ]
            if tested := [count for count in counts.values() if count >= needed]:
                gain = partial(
                    _format_detectable_gain, is_text(data.reference.documents), [alpha / count for count in counted]
                )
                now, less = gain(tests, tested), {"twice the documents": gain(tests, [2 * count for count in tested])}
                if len(counts) > 1:
                    less["no subdomains"] = gain(len(metrics) * len(context.domains), [sum(counts.values())])
                alike = f"; the more alike the {bands} candidates, the less" if counted[1:] else ""
                said.append(
                    f"power: {domain}, {metric}: a true gain of {now} is accepted with a chance of 80 % ({_format_range(tested, 0)} "
                    f"documents test it, {tests} tests share alpha {alpha}{alike}); "
                    + ", ".join(f"with {what} {lower}" for what, lower in less.items())
                )
    if not said:
        raise DataError(
            "No subdomain has enough reference documents for the guard to prove any gain:\n  "
            + "\n  ".join(hopeless)
            + "\nRaise --limit, use fewer subdomains (--subdomains) or fewer metrics (--metric), or choose without a guard "
            "(--select argmax)."
        )
    for line in [*said, *(f"warning: {line}" for line in hopeless)]:
        context.progress.say(line)


def _format_detectable_gain(text: bool, alphas: Sequence[float], tests: int, documents: Sequence[int]) -> str:
    """The gain that one of so many tests finds with a chance of 80 %, over subdomains of so many documents."""
    found = [(detectable_effect if text else detectable_gain)(n, alpha / tests) for n in documents for alpha in alphas]
    if text:
        return _format_range(found, 2) + " standard deviations between documents"
    return _format_range([100 * gain for gain in found], 0) + " points"


def _format_range(values: Sequence[float], places: int) -> str:
    """The smallest and the largest, or one where they read the same."""
    return " to ".join(dict.fromkeys(format_decimals(value, places) for value in (min(values), max(values))))


def purify_all(
    context: BuildContext,
    run: RunFolder,
    subdomains: Sequence[SubdomainState],
    ahead: ParallelBuildStages | None = None,
) -> None:
    """Signed purification of every subdomain, each a journalled unit, done by those ahead if there are any.

    Raises:
        NumericError: When a loss or gradient is NaN or infinite; names the subdomain.
    """
    recipe, section = context.recipe, context.recipe.saliency
    if SALIENCY not in competing_methods(recipe):
        return
    text = {s.name: is_text(s.split.documents) for s in subdomains}
    methods = {s.name: method_of(section, text[s.name], context.weights) for s in subdomains}
    # Rounds are the steps of the bar; a subdomain that ends early jumps to its end.
    most = {s.name: methods[s.name].rounds(section, text[s.name]) for s in subdomains}
    with context.progress.stage("signed purification", sum(most.values())) as advance:
        done = _prefetch_stage(ahead, "purify", run, subdomains, lambda name: advance(most[name]))
        for sub in subdomains:
            seen = most[sub.name] if sub.name in done else 0

            def on_round(number: int, loss: float, off: float) -> None:
                nonlocal seen
                advance(number - seen)
                seen = number

            def purify_subdomain(sub: SubdomainState = sub, on_round: OnRound = on_round) -> dict[str, Tensor]:
                gradient, stop, _ = ([sub.split.documents[i] for i in part] for part in sub.parts)
                task = PurifyTask(
                    context.model,
                    context.weights,
                    context.make_batches(gradient),
                    context.make_batches(stop),
                    text[sub.name],
                    recipe.seed,
                    on_round,
                    run.unit_state(f"purify|{sub.name}"),
                )
                try:
                    found = methods[sub.name].run(task, section)
                except NumericError as error:
                    raise NumericError(
                        f"Subdomain {sub.name!r}: {error} The base model is as it was; subdomains done before are kept for "
                        "a run of the same recipe."
                    ) from None
                return to_state(found)

            found = from_state(run.run_tensor_unit(f"purify|{sub.name}", purify_subdomain), context.weights)
            sub.curve, sub.forecast, sub.fitted = found.losses, found.forecast, found.mask
            advance(max(0, most[sub.name] - seen))


def shrink_all(
    context: BuildContext,
    run: RunFolder,
    subdomains: Sequence[SubdomainState],
    ahead: ParallelBuildStages | None = None,
) -> None:
    """Structured purification of every subdomain, each a journalled unit, done by those ahead if there are any.

    Raises:
        RecipeError: Shares of units that the layout cannot keep.
        NumericError: When a loss or gradient is NaN or infinite; names the subdomain.
    """
    recipe, section = context.recipe, context.recipe.units
    if section.unit is None:
        return
    if recipe.bands.layers is not None or recipe.bands.sublayers != "both":
        raise RecipeError(
            "Units are of the whole model: leave bands.layers and bands.sublayers (--layers, --sublayers) at their defaults "
            "with --unit."
        )
    units = find_units(context.model, section.unit)
    for share in section.off:
        numbers_off(units, share, section.layout, multiple_of(section, context.model.device))
    looks = len(section.off) * math.ceil(section.steps / section.every)
    with context.progress.stage("structured purification", len(subdomains) * looks) as advance:
        done = _prefetch_stage(ahead, "units", run, subdomains, lambda name: advance(looks))
        for sub in subdomains:
            seen = looks if sub.name in done else 0

            def on_look(step: int, loss: float, off: float) -> None:
                nonlocal seen
                seen += 1
                advance(1)

            def fit_subdomain_units(sub: SubdomainState = sub, on_look: OnLook = on_look) -> dict[str, Tensor]:
                gradient, stop, _ = (context.make_batches([sub.split.documents[i] for i in part]) for part in sub.parts)
                text = is_text(sub.split.documents)
                try:
                    return fit_units(
                        context.model, context.weights, units, gradient, stop, section, recipe.saliency,
                        singles=SALIENCY in recipe.search.metrics, text=text, seed=recipe.seed, on_look=on_look,
                        kept=run.unit_state(f"units|{sub.name}"),
                    ).to_tensors()  # fmt: skip
                except NumericError as error:
                    raise NumericError(f"Subdomain {sub.name!r}: {error} The base model is as it was.") from None

            sub.units = FoundUnits.from_tensors(
                units, context.weights, run.run_tensor_unit(f"units|{sub.name}", fit_subdomain_units)
            )
            sub.curve = sub.units.stopping_losses
            advance(max(0, looks - seen))


def search_subdomain(context: BuildContext, sub: SubdomainState) -> ScoreTable:
    """Let every metric find its best candidate in a subdomain and test it; returns the scores that were asked for."""
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
    sub.verdicts = tuple(verdicts)
    sub.rankings.clear_cache()
    return table


def _prefetch_stage(
    ahead: ParallelBuildStages | None,
    stage: Stage,
    run: RunFolder,
    subdomains: Sequence[SubdomainState],
    told: Callable[[str], None],
) -> set[str]:
    """Let those ahead fit what is not fitted yet; the names of all that they were given."""
    names = [s.name for s in subdomains if not run.has_tensors(f"{stage}|{s.name}")]
    return ahead.run_stage(stage, names, told) if ahead else set()


def choose_all(
    context: BuildContext, subdomains: Sequence[SubdomainState], ahead: ParallelBuildStages | None = None
) -> None:
    """Search each metric's candidates, test the winners with the search counted, accept the proven."""
    section = context.recipe.search
    tables = []
    with context.progress.stage("search", len(subdomains)) as advance:
        names = [s.name for s in subdomains]
        done = ahead.run_stage("search", names, lambda name: advance(1)) if ahead else set()
        for sub in subdomains:
            tables.append(search_subdomain(context, sub))
            advance(0 if sub.name in done else 1)
    adjusted = adjust_verdicts([s.verdicts for s in subdomains])
    for sub, verdicts, table in zip(subdomains, adjusted, tables, strict=True):
        sub.verdicts = tuple(verdicts)
        if section.select == "guarded":
            sub.choice = accept_candidate(verdicts, section.alpha)
        else:
            # The papers' rule: the best on the documents that chose it, if it beats the base at all.
            def selection_gain(v: CandidateVerdict, table: ScoreTable = table, sub: SubdomainState = sub) -> float:
                seen = sub.guard_indices if v.candidate in (SALIENCY, UNITS) else range(len(sub.split))
                return table.mean_gain(v.candidate, seen, section.objective)

            best = max(verdicts, key=selection_gain)
            # Units were asked for by their share: without a guard they are taken whatever they cost.
            sub.choice = best if selection_gain(best) > 0 or best.candidate == UNITS else None


def make_expert(context: BuildContext, sub: SubdomainState) -> DomainExpert:
    """Turn a subdomain's choice into what is written to disk; a choice that switches nothing off is the base."""
    found = _chosen_expert(context, sub)
    return found if found.switches or found.lines or found.ends else DomainExpert(sub.name)


def _chosen_expert(context: BuildContext, sub: SubdomainState) -> DomainExpert:
    if sub.choice is None:
        return DomainExpert(sub.name)
    if sub.choice.candidate == SALIENCY:
        return switch_expert(sub.name, sub.fitted or Mask())
    if sub.choice.candidate == UNITS and sub.units is not None:
        found = sub.units
        return unit_expert(sub.name, found.units.kind, found.units.line_indices(found.best_point.off), found.singles)
    band = sub.bands[sub.choice.candidate]
    norm, ends = sub.rankings.norm, sub.rankings.band_ends(band)
    sub.rankings.clear_cache()
    held = {t: norm(t) for t in dict.fromkeys(w.tap for w in context.weights)} if norm is not None else {}
    return band_expert(sub.name, band, ends, held, context.weights)
