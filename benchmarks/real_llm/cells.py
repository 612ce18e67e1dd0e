"""Cells: the smallest pieces of the benchmark, each measured once, written at once, and never done twice.

A cell's record is one JSON file whose name is the cell's; the weights that its expert switches off (or its adapter)
lie beside it as safetensors. A record counts only while everything that decided it is as it was: its identity.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.kept import keep_record, read_record
from freemoe.core.files import json_digest

BASE, ALL, EVERYTHING = "base", "tasks", "all"


@dataclass(frozen=True)
class Cell:
    """What is measured."""

    # ``text``, ``task``, ``cross`` (an expert on all other materials, or the base on all), ``union`` (two experts at
    # once), ``route`` (the experts of all tasks behind one router), ``count`` (fewer or more documents), ``home``
    # (another base), ``null`` (nothing to be learned), ``convert`` (to a mixture), ``mixture`` (split, for what
    # follows), ``trim`` (the split mixture), ``bands`` (MoDE's, of one ranking) or ``gates`` (ToMoE's, trained for some
    # steps)
    family: str
    # Name of the material or task; for ``null`` the number of the batch of builds; `ALL` for ``route``, `EVERYTHING`
    # for ``cross`` with the base
    material: str
    method: str = BASE  # A name of ``methods.METHODS``
    # Largest share off, for methods that switch off; for ``convert`` and ``gates`` the share of weights that a token
    # uses
    budget: float = 0.0
    rank: int = 0  # Of LoRA
    rate: float = 0.0  # Learning rate, for methods that train values
    seed: int = 0  # Of the split into parts and of the order of steps
    documents: int = 0  # Reference documents; 0 for the protocol's number. Of ``gates`` and ``mixture`` the steps
    base: str = ""  # Another base than the benchmark's, below the data folder or by name; empty for the benchmark's
    other: str = ""  # The second material of a union

    @property
    def treatment(self) -> str:
        """The method and its setting, without the learning rate: what a row of a table is."""
        text = self.method
        if self.rank:
            text += f"-r{self.rank}"
        if self.budget:
            text += f"-{self.budget:.4%}".rstrip("0%").rstrip(".") + "%"
        return text

    @property
    def name(self) -> str:
        """Unique name, as ``--only`` and ``--list`` have it: ``text/wikitext/lora-r1-lr0.002/s0``."""
        parts = [self.family]
        if self.base:
            parts.append(Path(self.base).name)
        parts.append(self.material + (f"+{self.other}" if self.other else ""))
        if self.family != "null":
            parts.append(self.treatment + (f"-lr{self.rate:g}" if self.rate else ""))
        if self.documents:
            parts.append(f"n{self.documents}")
        return "/".join([*parts, f"s{self.seed}"])

    @property
    def file(self) -> str:
        """Name of its files, without suffix."""
        return self.name.replace("/", "__")

    @classmethod
    def read(cls, values: dict[str, Any]) -> Cell:
        """A cell from a record's JSON; entries of later versions are left out."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in known})


class Store:
    """The folder with the finished cells' records, made when the first one is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, cell: Cell) -> Path:
        """Where a cell's record lies."""
        return self.folder / f"{cell.file}.json"

    def tensors(self, cell: Cell) -> Path:
        """Where a cell's expert lies."""
        return self.folder / f"{cell.file}.safetensors"

    def load(self, cell: Cell, identity: dict[str, Any]) -> dict[str, Any] | None:
        """The cell's record; None where there is none, or one of another model, data or setting."""
        return read_record(self.path(cell), json_digest(identity))

    def save(self, cell: Cell, identity: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
        """Write a finished cell; returns the record as it will be read."""
        about = {"cell": asdict(cell), "name": cell.name, "identity": json_digest(identity), "settings": identity}
        return keep_record(self.path(cell), {**record, **about})
