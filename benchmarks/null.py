"""T29: what the proofs promise where nothing is to be found, through the very functions that a build calls.

*Acceptance*: whole builds of made-up scores, several subdomains each, in which no candidate has a gain. *Power*: the same with
one candidate that gains, beside the test of earlier releases (two folds, each testing the other's winner). *Coverage* of the
intervals that users are shown, *margins* that a harmful candidate passes, and builds of the bundled base on answers drawn at
random.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from scipy.stats import beta, binom

from benchmarks.harness import Figure, Outcome, Settings, result_of
from freemoe.assets import DOMAINS
from freemoe.core.files import write_atomic
from freemoe.domain_experts.pipeline import build
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.domain_experts.select.choice import accept_candidate, adjust_verdicts, judge_winner, split_folds
from freemoe.domain_experts.select.scores import ScoreTable
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.statistics import Interval, mean_interval, mean_of_means
from freemoe.evals.tasks.documents import Document, ReferenceSplit

_SUBDOMAINS, _ALPHA = 12, 0.05
_BUILDS, _POWER, _COVERED, _REAL_BUILDS = 2000, 400, 4000, 200
_LEVEL, _COVERAGE, _POWER_SHARE = 6.0, 93.0, 0.9
ACCEPTANCE = [
    ("answers", 100, 10), ("answers", 100, 40), ("normal", 60, 10), ("normal", 100, 10), ("normal", 100, 40),
    ("skewed", 60, 10), ("skewed", 100, 10), ("skewed", 100, 40), ("normal", 100, 1), ("skewed", 60, 1), ("skewed", 100, 1),
]  # fmt: skip
"""Shape of the differences, documents of a subdomain, candidates."""
POWER = [(100, 10, 0.16), (300, 10, 0.1)]
"""Documents, candidates, and the gain of one of them in right answers."""
SHAPES = ("answers", "few answers", "normal", "t3", "skewed", "rare losses")

Draw = np.random.Generator


def differences(shape: str, rng: Draw, *size: int) -> np.ndarray:
    """Paired differences of mean zero.

    Answers: a fifth of them change (``few answers``: a twentieth), as often for the better. ``skewed``: one minus an exponential.
    ``rare losses``: normal around a small gain, and one document in twenty that loses three nats.
    """
    if shape == "normal":
        return rng.normal(size=size)
    if shape == "t3":
        return rng.standard_t(3, size=size)
    if shape == "skewed":
        return 1 - rng.exponential(size=size)
    if shape == "rare losses":
        return rng.normal(size=size) * 0.3 + np.where(rng.random(size) < 0.05, -2.85, 0.15)
    changed, which = (0.2 if shape == "answers" else 0.05), rng.random(size)
    return (which < changed / 2).astype(float) - (which > 1 - changed / 2)


def table_of(gains: np.ndarray) -> ScoreTable:
    """A table of scores whose differences to the base are ``gains``, ``(documents, candidates)`` named ``c0``, ``c1``, ..."""
    documents = tuple(Document("null", str(i), str(i), "target", "") for i in range(len(gains)))

    def compute(candidate: str, numbers: list[int]) -> list[DocumentScore]:
        column = np.zeros(len(gains)) if candidate == "base" else gains[:, int(candidate[1:])]
        return [DocumentScore(float(column[i]), 0.0, 1) for i in numbers]

    return ScoreTable(ReferenceSplit(documents), compute)


def accepts(tables: list[np.ndarray], seed: int) -> bool:
    """Whether a build of these subdomains accepts anything."""
    verdicts = []
    for gains in tables:
        names = [f"c{i}" for i in range(gains.shape[1])]
        verdicts.append([judge_winner(table_of(gains), "wanda", names, "exhaustive", "accuracy", seed)])
    return any(accept_candidate(group, _ALPHA) for group in adjust_verdicts(verdicts))


def acceptance(shape: str, documents: int, candidates: int, seed: int, first: int, builds: int) -> int:
    """How many builds of null candidates accept something: those numbered from ``first`` on."""
    found = 0
    for number in range(first, first + builds):
        rng = np.random.default_rng([seed, number, documents, candidates, SHAPES.index(shape)])
        found += accepts([differences(shape, rng, documents, candidates) for _ in range(_SUBDOMAINS)], number)
    return found


def power(documents: int, candidates: int, gain: float, seed: int, builds: int) -> tuple[float, float, float]:
    """Share of single tests that find a gain at the level of one of twelve: ours, the earlier one, and its share under the null."""
    level = _ALPHA / _SUBDOMAINS
    ours = earlier = null = 0
    for number in range(builds):
        rng = np.random.default_rng([seed, number, documents])
        nothing = differences("answers", rng, documents, candidates)
        gains = nothing.copy()
        which = rng.random(documents)
        gains[:, 0] = (which < 0.1 + gain / 2).astype(float) - (which > 0.9 + gain / 2)
        names = [f"c{i}" for i in range(candidates)]
        ours += judge_winner(table_of(gains), "wanda", names, "exhaustive", "accuracy", number).p <= level
        earlier += two_folds(gains, number) <= level
        null += two_folds(nothing, number) <= level
    return ours / builds, earlier / builds, null / builds


def two_folds(gains: np.ndarray, seed: int) -> float:
    """The test of earlier releases: winners of two folds on each other's documents, as if pooled gains were independent."""
    first, second = split_folds([str(i) for i in range(len(gains))], 2, seed)
    pooled = [gains[held, gains[inside].sum(0).argmax()] for held, inside in ((first, second), (second, first))]
    won, lost = (int(sum((part > 0).sum() for part in side)) for side in (pooled, [-part for part in pooled]))
    return float(binom.sf(won - 1, won + lost, 0.5))


def coverage(make: Callable[[Draw], Interval], seed: int, draws: int) -> float:
    """Per cent of intervals that hold zero."""
    rng = np.random.default_rng(seed)
    found = [make(rng) for _ in range(draws)]
    return 100 * float(np.mean([interval.low <= 0 <= interval.high for interval in found]))


def _interval(shape: str, documents: int, unequal: bool, rng: Draw) -> Interval:
    sizes = 1 + rng.integers(0, 6, documents) if unequal else np.ones(documents, int)
    values = np.repeat(differences(shape, rng, documents), sizes)
    return mean_interval(values.tolist(), [str(i) for i in np.repeat(np.arange(documents), sizes)])


def _over_domains(shape: str, rng: Draw) -> Interval:
    return mean_of_means([(differences(shape, rng, n).tolist(), [str(i) for i in range(n)]) for n in (30, 100, 300)])


def null_build(seed: int) -> bool:
    """Whether a build of the bundled base accepts anything on questions whose answers were drawn at random."""
    generator = random.Random(f"null/{seed}")
    with tempfile.TemporaryDirectory() as scratch:
        domains = {}
        for domain in DOMAINS:
            path = Path(scratch) / f"{domain}.jsonl"
            rows = [
                {"question": f"{domain} {generator.randrange(10**6)}?", "choices": ["a", "b", "c", "d"], "answer": generator.randrange(4)}
                for _ in range(160)
            ]  # fmt: skip
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            domains[domain] = (str(path),)
        recipe = BuildRecipe.model_validate(
            {
                "model": "freemoe-demo",
                "domains": domains,
                "output": str(Path(scratch) / "out"),
                "seed": seed,
                "dtype": "float32",
                "subdomains": {"by": "none"},
                "saliency": {"budget": 0.005, "patience": 3},
                "evidence": {"controls": 0, "oracle": False},
            }
        )
        result = result_of(build(recipe))
    return any(s["chosen"] != "base" for domain in result["domains"] for s in domain["subdomains"])


def kept(settings: Settings, name: str, count: int, step: int, measure: Callable[[int, int], int]) -> tuple[int, int]:
    """Count something over ``count`` seeded trials, ``step`` at a time, going on where ``--cells`` has a beginning.

    ``--minutes`` is shared by the cases, so that a run that is cut short has some of each.

    Returns:
        How often it happened, of how many trials.
    """
    path = None if settings.cells is None else settings.cells / f"null-{name}-{settings.seed}.json"
    done, found = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else (0, 0)
    until = time.monotonic() + 60 * (settings.minutes or math.inf) / (len(ACCEPTANCE) + 1)
    while done < count and (not done or time.monotonic() < until):
        size = min(step, count - done)
        found, done = found + measure(done, size), done + size
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps([done, found]).encode())
    return found, done


def run(settings: Settings) -> Outcome:
    """All of it; ``--only`` names parts: ``acceptance``, ``builds``, ``power``, ``coverage``, ``margin``."""
    scale = 100 if settings.quick else 1
    parts = {"acceptance": _acceptance, "power": _power, "coverage": _coverage, "margin": _margin, "builds": _builds}
    figures: list[Figure] = []
    wanted = [part for part in parts if settings.wants(part)]
    with settings.progress.stage("null", len(wanted)) as advance:
        for part in wanted:
            figures += parts[part](settings, scale)
            advance(1)
    return Outcome(tuple(figures))


def _acceptance(settings: Settings, scale: int) -> list[Figure]:
    figures = []
    for shape, documents, candidates in ACCEPTANCE:
        found, of = kept(
            settings, f"{shape}-{documents}-{candidates}", max(4, _BUILDS // scale), 50,
            lambda first, size, case=(shape, documents, candidates): acceptance(*case, settings.seed, first, size),
        )  # fmt: skip
        what = (
            f"null builds accepted: {_SUBDOMAINS} subdomains, {shape}, {documents} documents, {candidates} candidates"
        )
        note = f"{found} of {of} builds at {_ALPHA}"
        figures.append(Figure(what, 100 * found / of, _LEVEL, "lower", " %", note=note))
    return figures


def _power(settings: Settings, scale: int) -> list[Figure]:
    figures = []
    for documents, candidates, gain in POWER:
        ours, earlier, null = power(documents, candidates, gain, settings.seed, max(4, _POWER // scale))
        note = (
            f"{ours:.1%} against {earlier:.1%}, whose share under the null is {null:.2%} at {_ALPHA / _SUBDOMAINS:.2%}"
        )
        what = f"power over the earlier test's: answers, {documents} documents, {candidates} candidates, {100 * gain:g} points"
        figures.append(Figure(what, ours / earlier if earlier else math.nan, _POWER_SHARE, note=note))
    return figures


def _coverage(settings: Settings, scale: int) -> list[Figure]:
    draws = max(20, _COVERED // scale)
    cases = {
        f"{shape}, {n} documents{', in clusters of 1 to 6' if unequal else ''}": partial(_interval, shape, n, unequal)
        for shape in SHAPES
        for n in (30, 100, 300)
        for unequal in (False, True)
    }
    cases |= {
        f"mean of three domains, {shape}": partial(_over_domains, shape) for shape in ("answers", "normal", "skewed")
    }
    return [
        Figure(f"coverage of intervals: {name}", coverage(make, settings.seed, draws), _COVERAGE, "higher", " %", 1)
        for name, make in cases.items()
    ]


def _margin(settings: Settings, scale: int) -> list[Figure]:
    """Candidates whose true loss is the margin of one point: how many pass for harmless."""
    rng, draws, figures = np.random.default_rng(settings.seed), max(20, _COVERED // scale), []
    for documents in (100, 300):
        passed = 0
        for _ in range(draws):
            which = rng.random(documents)
            gains = (which < 0.02).astype(float) - (which > 0.97)
            passed += mean_interval(gains.tolist(), [str(i) for i in range(documents)]).low >= -0.01
        what = f"a true loss of a point called harmless: answers, {documents} documents"
        figures.append(Figure(what, 100 * passed / draws, 5.0, "lower", " %"))
    return figures


def _builds(settings: Settings, scale: int) -> list[Figure]:
    def measure(first: int, size: int) -> int:
        return sum(null_build(seed) for seed in range(first, first + size))

    found, of = kept(settings, "builds", max(1, _REAL_BUILDS // scale), 5, measure)
    most = 100 * float(beta.ppf(0.95, found + 1, of - found))
    note = f"{found} of {of} builds, three domains each; at most {most:.1f} % (95 %)"
    name = "null builds of the bundled base that accepted something"
    return [Figure(name, 100 * found / of, _LEVEL, "lower", " %", note=note)]
