"""T2: the papers' search, every band on every subdomain, against the plain loop, with the same bands chosen.

For each cell the plain loop does what the papers describe: copy the weights, rank them, write the masked ones, score
the subdomain's documents with lm-eval's HF backend, copy the weights back. Ours ranks once per subdomain, switches off
in place, and runs shared few-shot prefixes once. Both are given the norms of one calibration.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Figure, Outcome, Settings, in_turns, ratio
from benchmarks.speed.scorer import Contest, Shape, letters_model, questions, word_tokenizer
from freemoe.core.errors import NumericError
from freemoe.domain_experts.purify.batches import answer_batches, gold_rows
from freemoe.domain_experts.rank.bands import Band, BandRankings, band_grid, rank_range
from freemoe.domain_experts.rank.calibrate import InputNorms, calibrate
from freemoe.domain_experts.recipe import BandSection
from freemoe.domain_experts.select.scores import ScoreTable
from freemoe.domain_experts.select.search import SEARCHES
from freemoe.evals.engine.evaluator import DocumentScore, Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document, ReferenceSplit
from freemoe.evals.tasks.harness.rows import require_lm_eval
from freemoe.evals.tasks.task import TaskGrader
from freemoe.models.switching import switched_off
from freemoe.models.weights import WeightMatrix, find_weights

TARGET = 10.0
# 318 tokens of context, 276 of them shared; every subject is a subdomain with 48 reference documents.
SHAPE = Shape(4, 48, 276, (30, 54), (1, 1))
QUICK_SHAPE = Shape(2, 6, 40, (6, 10), (1, 1))
# A round takes the plain loop forty evaluations.
MOST_ROUNDS = 2
# Two answers nearer than this, in nats, may change places by rounding.
CLOSE = 1e-4

Table = dict[str, list[float]]
"""Right (1) or wrong (0) per document, by band."""


@dataclass(eq=False)
class Found:
    """What one side found: the chosen band and the table of every subdomain."""

    chosen: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    @property
    def scored(self) -> int:
        """How many documents were scored, over all bands."""
        return sum(len(row) for table in self.tables for row in table.values())


@dataclass(eq=False)
class World:
    """A random model, documents in subdomains, the norms that both sides are given, and lm-eval at its best."""

    model: Any
    tokenizer: Any
    vocabulary: int
    weights: list[WeightMatrix]
    splits: list[ReferenceSplit]
    norms: InputNorms
    bands: list[Band]
    rival: Contest


def run(settings: Settings) -> Outcome:
    """Sweep all cells on both sides, in turns, at two sizes of the vocabulary; ours by successive halving too."""
    require_lm_eval("bench sweep")
    rounds = min(settings.rounds, MOST_ROUNDS)
    small, large = (90, 300) if settings.quick else (722, 32000)
    figures: list[Figure] = []
    details: dict[str, Any] = {"threads": torch.get_num_threads()}
    with settings.progress.stage("sweep", 3 * rounds + 2) as advance:
        world = _world(small, SHAPE, settings)
        found, seconds = _contest(world, ("plain", "freemoe", "halving"), rounds, settings.seed, advance)
        halved = [a == b for a, b in zip(found["halving"][0].chosen, found["plain"][0].chosen, strict=True)]
        share = found["halving"][0].scored / found["freemoe"][0].scored
        note = f"scores {share:.0%} of the cells' documents; {sum(halved)} of {len(halved)} subdomains choose the same band"
        halving = Figure("the same by successive halving", ratio(seconds, "plain", "halving"), note=note)
        figures += [_exhaustive(world, seconds), halving]
        details[f"vocabulary {small}"] = _details(world, found, seconds)
        # The head and its softmax take lm-eval most of its time here; two subdomains say it as well as four.
        world = _world(large, replace(SHAPE, subjects=2), settings)
        found, seconds = _contest(world, ("plain", "freemoe"), 1, settings.seed, advance)
        figures.append(_exhaustive(world, seconds))
        details[f"vocabulary {large}"] = _details(world, found, seconds)
    return Outcome(tuple(figures), details)


Sides = dict[str, list[Found]]
Seconds = dict[str, list[float]]


def _contest(
    world: World, names: Sequence[str], rounds: int, seed: int, advance: Callable[[int], None]
) -> tuple[Sides, Seconds]:
    """Both sides in turns; raises unless they find the same."""
    found: Sides = {name: [] for name in names}

    def side(name: str) -> None:
        found[name].append(_plain(world) if name == "plain" else _ours(world, name, seed))
        advance(1)

    # Choosing lm-eval's batch size and calibrating have warmed both up.
    seconds = in_turns({name: lambda name=name: side(name) for name in names}, rounds, warm=False)
    _check_same(world, found)
    return found, seconds


def _exhaustive(world: World, seconds: Seconds) -> Figure:
    return Figure(
        f"sweep of {len(world.bands)} bands x {len(world.splits)} subdomains, vocabulary {world.vocabulary}",
        ratio(seconds, "plain", "freemoe"),
        TARGET,
        note=f"same bands chosen; lm-eval at batch size {world.rival.batch_size}; scoring alone: ideal by tokens "
        f"{world.rival.details['ideal']:g}x",
    )


def _details(world: World, found: Sides, seconds: Seconds) -> dict[str, Any]:
    return {
        "cells": len(world.bands) * len(world.splits),
        "chosen": {name: sides[0].chosen for name, sides in found.items()},
        "rival_batch_size": world.rival.batch_size,
        "rival_seconds_by_batch_size": world.rival.details["rival_seconds_by_batch_size"],
        "seconds": {name: [round(s, 3) for s in values] for name, values in seconds.items()},
    }


def _world(vocabulary: int, shape: Shape, settings: Settings) -> World:
    shape = QUICK_SHAPE if settings.quick else shape
    model, tokenizer = letters_model(vocabulary, settings), word_tokenizer(vocabulary)
    texts = questions(shape, vocabulary, settings.seed)
    rng = random.Random(settings.seed)
    documents = [
        Document("letters", str(i), str(i), "choice", t[0][0], tuple(a for _, a in t), rng.randrange(len(t)), index=i)
        for i, t in enumerate(texts)
    ]
    splits = [
        ReferenceSplit(tuple(documents[i : i + shape.documents])) for i in range(0, len(documents), shape.documents)
    ]
    weights = find_weights(model)
    scorer = Scorer(model, tokenizer)
    labels = [i // shape.documents for i in range(len(documents))]
    batches = answer_batches(gold_rows(scorer, documents), labels, 4096, model.device)
    norms = calibrate(model, weights, ((b.ids, b.mask, b.labels) for b in batches), len(splits))
    bands = band_grid(BandSection(start=0.0, end=1.0, step=0.1, ratio=0.1), "wanda", settings.seed)
    rival = Contest(model, tokenizer, texts, settings)
    return World(model, tokenizer, vocabulary, weights, splits, norms, bands, rival)


def _grade(document: Document, responses: Any) -> dict[str, float]:
    values = [r[0] for r in responses]
    return {"acc": float(values.index(max(values)) == document.gold)}


def _ours(world: World, search: str, seed: int) -> Found:
    """Rankings, switching and scoring as a build does them, nothing kept from an earlier round."""
    search = "exhaustive" if search == "freemoe" else search
    evaluator = Evaluator(Scorer(world.model, world.tokenizer), {"letters": TaskGrader("letters", "acc", _grade)})
    by_name = {band.name: band for band in world.bands}
    found = Found()
    for group, split in enumerate(world.splits):
        rankings = BandRankings(world.weights, lambda tap, g=group: world.norms.input_norm(tap, g, 2), world.bands)
        table: Table = {name: [] for name in by_name}

        def compute(
            name: str,
            numbers: list[int],
            split: ReferenceSplit = split,
            rankings: BandRankings = rankings,
            table: Table = table,
        ) -> list[DocumentScore]:
            with switched_off(world.weights, rankings.mask_of_band(by_name[name])):
                scores = evaluator.score([split.documents[i] for i in numbers])
            table[name] += [s.value for s in scores]
            return scores

        every = range(len(split))
        found.chosen.append(SEARCHES.get(search)(ScoreTable(split, compute), list(by_name), every, "accuracy", seed))
        found.tables.append(table)
    return found


@torch.no_grad()
def _plain(world: World) -> Found:
    """Algorithm 1 of MoDE as it is written."""
    from lm_eval.api.instance import Instance

    found = Found()
    for group, split in enumerate(world.splits):
        table: Table = {}
        for band in world.bands:
            saved = {w.name: w.parameter.clone() for w in world.weights}
            for weight in world.weights:
                norm = world.norms.input_norm(weight.tap, group, 2)
                weight.parameter.masked_fill_(_plain_mask(weight, norm, band), 0)
            requests = [
                Instance("loglikelihood", {}, (document.prompt, answer), i)
                for i, document in enumerate(split.documents)
                for answer in document.answers
            ]
            answers = iter(world.rival.rival.loglikelihood(requests, disable_tqdm=True))
            table[band.name] = [_grade(d, [next(answers) for _ in d.answers])["acc"] for d in split.documents]
            for weight in world.weights:
                weight.parameter.copy_(saved[weight.name])
        found.tables.append(table)
        found.chosen.append(max(table, key=lambda name, table=table: sum(table[name])))
    return found


def _plain_mask(weight: WeightMatrix, norm: Tensor, band: Band) -> Tensor:
    """Mask of a Llama's matrix, (rows, columns)."""
    order = torch.sort(weight.parameter.abs() * norm, dim=-1, stable=True).indices
    low, high = rank_range(band.start, band.end, weight.num_columns)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[:, low:high], True)


def _check_same(world: World, found: Sides) -> None:
    """Raise unless all exhaustive sweeps chose the same bands and graded the same, rounding aside."""
    first = found["plain"][0]
    for other in found["plain"][1:] + found["freemoe"]:
        if other.chosen != first.chosen:
            raise NumericError(f"Other bands are chosen: {other.chosen} instead of {first.chosen}.")
        for group, (mine, theirs) in enumerate(zip(other.tables, first.tables, strict=True)):
            for name, values in theirs.items():
                for i, (a, b) in enumerate(zip(mine[name], values, strict=True)):
                    if a != b:
                        _check_near(world, group, name, i)


def _check_near(world: World, group: int, band: str, number: int) -> None:
    """Raise unless a document's two best answers are as good as equal under a band."""
    rankings = BandRankings(world.weights, lambda tap: world.norms.input_norm(tap, group, 2))
    scorer = Scorer(world.model, world.tokenizer)
    document = world.splits[group].documents[number]
    with switched_off(world.weights, rankings.mask_of_band(next(b for b in world.bands if b.name == band))):
        values = sorted(s.loglikelihood for s in scorer.score(scorer.document_pairs(document)))
    if values[-1] - values[-2] > CLOSE:
        raise NumericError(
            f"Document {number} of subdomain {group} is graded differently under {band}, and not by rounding: "
            f"its best answers differ by {values[-1] - values[-2]:.2g} nats."
        )
