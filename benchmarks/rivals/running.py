"""`python -m benchmarks rivals`: run the cells that are missing; a table, a picture and figures of all that are there."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.harness import Figure, Outcome, Settings
from benchmarks.kept import matches
from benchmarks.real_llm.cells import Cell, Store
from benchmarks.real_llm.protocol import Protocol, faster_format, files_digest, identity, model_digest
from benchmarks.real_llm.running import Bench, listed
from benchmarks.rivals.picture import picture
from benchmarks.rivals.plan import MATERIALS, cells, data_folder, estimates, protocol_of
from benchmarks.rivals.rival import RIVALS
from benchmarks.rivals.tables import entries_of, figures_of, markdown
from freemoe.core.errors import DataError
from freemoe.core.files import write_atomic

FORMAT = 1
"""Raised when what a cell measures changes for every rival."""


@dataclass(eq=False)
class RivalBench(Bench):
    """The plan of all bases; `Bench` runs it cell by cell."""

    function: ClassVar[str] = "benchmarks.rivals.measure:measure_rival"
    quick: bool = False

    def terms(self, cell: Cell) -> Protocol:
        """The protocol of the cell's base; tiny ones stay in fp32, as casting their weights takes longer than it saves."""
        protocol = protocol_of(cell.base, self.quick)
        return protocol if cell.base else replace(protocol, train=self.protocol.train, score=self.protocol.score)

    def identity(self, cell: Cell) -> dict[str, Any]:
        """What decides a cell's record: model, data, terms, and the version of the rival's row."""
        rival = RIVALS.get(cell.method)
        row = {"fit": rival.fit, "options": str(sorted(rival.options.items())), "version": str(rival.version)}
        folder, files = data_folder(cell.material, self.root), MATERIALS[cell.material].files
        own = self.digest(f"model|{self.base(cell)}", lambda: model_digest(self.base(cell)))
        data = self.digest(f"data|{cell.material}", lambda: files_digest(folder, files))
        return identity(cell, self.terms(cell), own, data, {**row, "format": str(FORMAT)})


def bench_of(settings: Settings) -> RivalBench:
    """The plan that the settings ask for, with every record that is there.

    Raises:
        DataError: A model without a data folder; a pattern that names no cell.
    """
    if settings.model is not None and settings.data_root is None and not settings.quick:
        raise DataError("`python -m benchmarks rivals --model` needs the benchmarks' files: --data-root FOLDER.")
    folder = settings.cells or settings.cache / "rival-cells"
    wanted = cells(settings.model, settings.data_root, settings.quick, settings.seed)
    for pattern in (settings.only or "").split(","):
        if pattern and not any(matches(cell.name, pattern) for cell in wanted):
            raise DataError(
                f"--only {pattern!r} names no cell. Cells are called as `python -m benchmarks rivals --list` shows them, such as "
                f"{wanted[0].name!r}; the rivals are {', '.join(RIVALS)}."
            )
    protocol = protocol_of("", settings.quick)
    if settings.model is not None and not settings.quick:
        number_format = faster_format(folder, settings.model)
        protocol = replace(protocol, train=number_format, score=number_format)
    root = settings.data_root or data_folder("demo-text", None)
    bench = RivalBench(settings.model or "", root, Store(folder), protocol, wanted, quick=settings.quick)
    bench.look()
    return bench


def listing(settings: Settings) -> list[dict[str, Any]]:
    """Every cell in order: its name, whether it is done, and the seconds that it took, or about will."""
    bench = bench_of(settings)
    return listed(bench, estimates(bench.wanted, bench.finished, settings.quick), settings.only)


def run(settings: Settings) -> Outcome:
    """Run what is missing, then make figures and the table of all that is there."""
    bench = bench_of(settings)
    bench.run_missing(settings.only, settings.minutes, settings.progress, settings.place)
    shown = ("about", "paper", "changes", "groups", "bases", "ours")
    details = {
        "cells": {"done": len(bench.finished), "planned": len(bench.wanted)},
        "failed": bench.failed,
        "protocols": {
            name: asdict(protocol_of(name, settings.quick)) for name in sorted({c.base for c in bench.wanted})
        },
        "model": Path(bench.model).name,
        "rivals": {name: {n: getattr(RIVALS.get(name), n) for n in shown} for name in RIVALS},
        "entries": entries_of(bench.finished, bench.failed, bench.wanted),
    }
    figures = figures_of(bench.finished)
    if settings.only is None:
        planned = len(bench.wanted)
        figures.insert(0, Figure("cells that are measured", len(bench.finished), planned, unit="", digits=0))
    return Outcome(tuple(figures), details)


def draw(details: dict[str, Any], folder: Path) -> None:
    """Write ``rivals.md`` and ``rivals.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"md": markdown(details), "svg": picture(details)}
    for suffix, text in found.items():
        if text is not None:
            write_atomic(folder / f"rivals.{suffix}", text.encode())
