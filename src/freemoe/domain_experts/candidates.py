"""The candidates of every subdomain on their way through a build: made, fitted, searched, chosen, made experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from freemoe.domain_experts.bands import Band, Rankings, grid
from freemoe.domain_experts.calibrate import Norms
from freemoe.domain_experts.choice import Verdict, accept, adjust, cross_fit, held_out, shares
from freemoe.domain_experts.evidence import is_text
from freemoe.domain_experts.expert import Expert, band_expert, switch_expert
from freemoe.domain_experts.importance import METRICS
from freemoe.domain_experts.saliency import purify
from freemoe.domain_experts.scores import Score, ScoreTable
from freemoe.domain_experts.search import SEARCHES
from freemoe.domain_experts.subdomains import Subdomains
from freemoe.domain_experts.workbench import Workbench
from freemoe.errors import DataError
from freemoe.evals.documents import ReferenceSplit
from freemoe.recipes import SaliencySection
from freemoe.runs import RunFolder

SALIENCY = "saliency"


@dataclass(eq=False)
class Subdomain:
    """One subdomain on its way through the build.

    Attributes:
        name: ``DOMAIN/...``.
        domain: Its domain.
        number: Its number over all domains: the group of the calibration.
        split: Its reference documents.
        bands: Candidates by name.
        rankings: Makes the bands' positions.
        fitted: Positions of the candidate that signed purification found, or None.
        curve: The stopping loss over its rounds.
        guard: Documents that neither fitted nor stopped it.
        verdicts: What each metric's winner showed.
        choice: The accepted one, or None.
    """

    name: str
    domain: str
    number: int
    split: ReferenceSplit
    bands: dict[str, Band]
    rankings: Rankings
    fitted: dict[str, Tensor] | None = None
    curve: tuple[float, ...] = ()
    guard: tuple[int, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    choice: Verdict | None = None

    def positions(self, candidate: str) -> dict[str, Tensor]:
        """Weights that a candidate switches off."""
        if candidate == "base":
            return {}
        if candidate == SALIENCY:
            return self.fitted or {}
        return self.rankings.positions(self.bands[candidate])


def make_subdomains(bench: Workbench, divided: dict[str, Subdomains], norms: Norms | None) -> list[Subdomain]:
    """List every subdomain with the bands that compete for it."""
    found = []
    recipe = bench.recipe
    for name, part in divided.items():
        for k, subdomain in enumerate(part.names):
            number = len(found)
            members = [i for i, label in enumerate(part.labels) if label == k]
            bands = {
                b.name: b
                for m in recipe.search.metrics
                if METRICS.get(m).needs != "gradients"
                for b in grid(recipe.bands, m, recipe.seed)
            }
            found.append(
                Subdomain(
                    subdomain,
                    name,
                    number,
                    bench.domains[name].reference.take(members),
                    bands,
                    Rankings(bench.weights, _norm_of(norms, number, recipe.bands.p, bench)),
                )
            )
    return found


def _norm_of(norms: Norms | None, number: int, p: str, bench: Workbench) -> Callable[[str], Tensor] | None:
    if norms is None:
        return None
    return lambda tap: norms.norm(tap, number, float(p)).to(bench.model.device)


def purify_all(bench: Workbench, run: RunFolder, subdomains: list[Subdomain]) -> None:
    """Signed purification of every subdomain, each a journalled unit."""
    recipe = bench.recipe
    if SALIENCY not in recipe.search.metrics:
        return
    section = recipe.saliency
    # Rounds are the steps of the bar; a subdomain that ends early jumps to its end.
    most = {s.name: max(1, int(section.budget / _step(s, section))) for s in subdomains}
    with bench.progress.stage("signed purification", sum(most.values())) as advance:
        for sub in subdomains:
            keys = [d.key for d in sub.split.documents]
            gradient, stop, guard = shares(keys, [section.gradient_share, section.stop_share], recipe.seed)
            if not (gradient and stop and guard):
                raise DataError(
                    f"Subdomain {sub.name!r} has {len(keys)} reference documents: too few to give gradients, to stop and to "
                    "guard. Raise --limit, or use fewer subdomains (--subdomains)."
                )
            sub.guard = tuple(guard)
            seen = 0

            def on_round(number: int, loss: float, off: float) -> None:
                nonlocal seen
                seen = number
                advance(1)

            def work(sub: Subdomain = sub, gradient: list[int] = gradient, stop: list[int] = stop) -> dict[str, Tensor]:
                docs = sub.split.documents
                found = purify(
                    bench.model,
                    bench.weights,
                    bench.batches([docs[i] for i in gradient]),
                    bench.batches([docs[i] for i in stop]),
                    step=_step(sub, section),
                    budget=section.budget,
                    patience=section.patience,
                    part_tokens=section.part_tokens,
                    on_round=on_round,
                )
                return {**found.positions, "|curve": torch.tensor(found.losses, dtype=torch.float64)}

            tensors = run.tensors(f"purify|{sub.name}", work)
            sub.curve = tuple(tensors.pop("|curve").tolist())
            sub.fitted = {k: v.to(bench.model.device) for k, v in tensors.items()}
            advance(max(0, most[sub.name] - seen))


def _step(sub: Subdomain, section: SaliencySection) -> float:
    return section.text_step if is_text(sub.split.documents) else section.step


def choose_all(bench: Workbench, subdomains: list[Subdomain]) -> None:
    """Search each metric's candidates, test the winners on documents that did not choose them, accept the proven."""
    section, seed = bench.recipe.search, bench.recipe.seed
    search = SEARCHES.get(section.method)
    tables = []
    with bench.progress.stage("search", len(subdomains)) as advance:
        for sub in subdomains:

            def compute(candidate: str, numbers: list[int], sub: Subdomain = sub) -> list[Score]:
                documents = [sub.split.documents[i] for i in numbers]
                return bench.scores(sub.domain, f"{sub.name}|{candidate}", sub.positions(candidate), documents)

            table = ScoreTable(sub.split, compute)
            tables.append(table)
            verdicts = []
            for metric in section.metrics:
                if metric == SALIENCY:
                    verdicts.append(held_out(table, metric, SALIENCY, sub.guard, seed))
                    continue
                names = [n for n, b in sub.bands.items() if b.metric == metric]
                verdicts.append(cross_fit(table, metric, names, search, section.objective, section.folds, seed))
            sub.verdicts = tuple(verdicts)
            sub.rankings.forget()
            advance(1)
    adjusted = adjust([s.verdicts for s in subdomains])
    for sub, verdicts, table in zip(subdomains, adjusted, tables, strict=True):
        sub.verdicts = tuple(verdicts)
        if section.select == "guarded":
            sub.choice = accept(verdicts, section.alpha)
        else:
            # The papers' rule: the best on the documents that chose it, if it beats the base at all.
            def gain(v: Verdict, table: ScoreTable = table, sub: Subdomain = sub) -> float:
                seen = list(sub.guard) if v.candidate == SALIENCY else range(len(sub.split))
                return sum(table.gains(v.candidate, seen, section.objective)) / len(seen)

            best = max(verdicts, key=gain)
            sub.choice = best if gain(best) > 0 else None


def make_expert(bench: Workbench, sub: Subdomain) -> Expert:
    """Turn a subdomain's choice into what is written to disk."""
    if sub.choice is None:
        return Expert(sub.name)
    if sub.choice.candidate == SALIENCY:
        return switch_expert(sub.name, sub.fitted or {})
    band = sub.bands[sub.choice.candidate]
    norm, ends = sub.rankings.norm, sub.rankings.ends(band)
    sub.rankings.forget()
    held = {t: norm(t) for t in dict.fromkeys(w.tap for w in bench.weights)} if norm is not None else {}
    return band_expert(sub.name, band, ends, held, bench.weights)
