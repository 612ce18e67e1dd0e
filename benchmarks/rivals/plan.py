"""Which rivals meet on which bases and materials: the cells, and about how long each takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.real_llm.cells import BASE, Cell
from benchmarks.real_llm.data import MATERIALS as REAL
from benchmarks.real_llm.data import Material, Texts, text_material
from benchmarks.real_llm.plan import seconds_of
from benchmarks.real_llm.protocol import Protocol, quick_protocol
from benchmarks.rivals.rival import RIVALS, Base, Group, Rival, Schedule
from freemoe.assets import BUNDLED, BUNDLED_MOE, DOMAINS, benchmark_path
from freemoe.evals.tasks.domains import load_domain
from freemoe.evals.tasks.task import DomainData
from freemoe.models.spec import FAMILIES
from freemoe.recipes import DataSection

SHARES: dict[Group, tuple[float, ...]] = {"adaptation": (0.01, 0.05), "compression": (0.2, 0.5)}
"""Shares off at which rivals that are told one meet."""
STORIES = "models/stories260k"


# --------------------------------------------------------------------------------------- materials


def _demo_text(root: Path) -> Texts:
    def text(domain: str, split: str) -> str:
        rows = map(json.loads, benchmark_path(domain, split).read_text(encoding="utf-8").splitlines())
        whole = (
            r["prompt"] + r["target"] if "target" in r else f"{r['question']} {r['choices'][r['answer']]}\n"
            for r in rows
        )
        return "".join(whole)

    reference, reported = ([text(d, s) for d in DOMAINS] for s in ("reference", "test"))
    return reference, reported


def _demo_code(root: Path, tokenizer: Any, protocol: Protocol) -> DomainData:
    limit = max(protocol.reference, protocol.questions)
    return load_domain("demo-code", ["demo:code"], DataSection(limit=limit), tokenizer=tokenizer)


_DEMO_FILES = tuple(f"{d}.{s}.jsonl" for d in DOMAINS for s in ("reference", "test"))
DEMO_MATERIALS = {
    "demo-text": text_material(
        "demo-text", _DEMO_FILES, "the bundled benchmark as text: reference and test", _demo_text
    ),
    "demo-code": Material("demo-code", "task", _DEMO_FILES, "the bundled benchmark's code", _demo_code),
}
MATERIALS: dict[str, Material] = {**REAL, **DEMO_MATERIALS}


def data_folder(material: str, root: Path | None) -> Path:
    """Below which folder a material's files lie."""
    return benchmark_path(DOMAINS[0], "test").parent if material in DEMO_MATERIALS or root is None else root


# ------------------------------------------------------------------------------------------- bases


@dataclass(frozen=True)
class Home:
    """A base, as `Cell.base` has it, and what it is tried on; on tasks only rivals of the group ``adaptation`` meet."""

    base: str
    kind: Base
    texts: tuple[str, ...]
    tasks: tuple[str, ...]


def homes(model: str | None, root: Path | None, quick: bool) -> list[Home]:
    """The bundled bases, the small real one where its files are, and the model that was asked for."""
    found = [Home(BUNDLED, "dense", ("demo-text",), ("demo-code",)), Home(BUNDLED_MOE, "mixture", ("demo-text",), ())]
    if quick:
        return found
    if root is not None and (root / STORIES).exists():
        found.append(Home(STORIES, "dense", ("wikitext", "gsm8k"), ("gsm8k-matching",)))
    if model is not None:
        found.append(Home("", kind_of(model), ("wikitext", "gsm8k"), ("arc-easy",)))
    return found


def kind_of(model: str) -> Base:
    """Whether a folder holds a mixture, by its configuration; a file or a hub id is taken for dense."""
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        return "dense"
    found = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    families = [FAMILIES.get(name) for name in FAMILIES]
    return "mixture" if any(found in f.model_types and f.gate is not None for f in families) else "dense"


def protocol_of(base: str, quick: bool) -> Protocol:
    """The terms on a base: tiny ones take five times the steps (`Stand.schedule`); a large one is tried on less of all."""
    if quick:
        return replace(quick_protocol(), reference=24, blocks=6)
    if base:
        return Protocol(reference=240, blocks=120, questions=400, schedule=Schedule(24, 1024, 6, 3))
    return Protocol(reference=160, blocks=48, questions=160, schedule=Schedule(30, 1024, 10, 3))


# ------------------------------------------------------------------------------------------- cells


def cells(model: str | None, root: Path | None, quick: bool, seed: int = 0) -> list[Cell]:
    """Every cell in order: a base's first, then its rivals'; a quick plan has every rival once, beside the bases."""
    found: list[Cell] = []
    for home in homes(model, root, quick):
        for material in (*home.texts, *home.tasks):
            groups: tuple[Group, ...] = ("adaptation", "compression") if material in home.texts else ("adaptation",)
            for group in groups:
                for name in RIVALS:
                    rival = RIVALS.get(name)
                    if group in rival.groups and home.kind in rival.bases:
                        found += _settings(rival, Cell(group, material, name, seed=seed, base=home.base), quick)
    if quick:
        once = {cell.method: cell for cell in reversed(found)}
        found = [cell for cell in found if cell.method == BASE or cell == once[cell.method]]
    return found


def _settings(rival: Rival, cell: Cell, quick: bool) -> Iterator[Cell]:
    shares = SHARES[cell.family] if rival.sized else (0.0,)  # pyright: ignore[reportArgumentType]
    for share in shares[:1] if quick else shares:
        for rate in rival.rates[: 1 if quick else None] or (0.0,):
            yield replace(cell, budget=share, rank=rival.rank, rate=rate)


# -------------------------------------------------------------------------------------------- time

# Tokens' forward passes per second: of 135 million weights on two cores, and of the tiny bases.
_SPEED, _TINY_SPEED = 600.0, 15000.0
_START = 8.0
"""Seconds that a process takes before it does anything."""


def estimates(wanted: Sequence[Cell], finished: dict[str, dict[str, Any]], quick: bool) -> dict[str, float]:
    """Seconds that every cell may take: after what finished ones of its base and method took, else of its base."""

    def first(cell: Cell) -> float:
        return 1 / (_TINY_SPEED if cell.base else _SPEED)

    def kinds(cell: Cell) -> list[tuple[str, ...]]:
        return [(cell.base, cell.method), (cell.base,)]

    return seconds_of(wanted, finished, lambda cell: _work(cell, quick), kinds, first, _START)


def _work(cell: Cell, quick: bool) -> float:
    """About how many tokens' forward passes a cell takes."""
    protocol, rival = protocol_of(cell.base, quick), RIVALS.get(cell.method)
    text = MATERIALS[cell.material].kind == "text"
    each = 256 if text else 120
    reported = (protocol.blocks if text else 4 * protocol.questions) * each
    gradient, stop = 0.4 * protocol.reference * each, 0.25 * protocol.reference * each
    if cell.method == BASE:
        return reported + stop
    times = 5 if cell.base else 1
    schedule = protocol.schedule
    trained = 3 * times * schedule.steps * schedule.step_tokens + stop * (1 + schedule.steps / schedule.every)
    if rival.rates or rival.ours or cell.method == "laser":
        return reported + trained + 3 * gradient
    return reported + 3 * gradient
