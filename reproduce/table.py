"""What a paper's table or figure is here: its numbers as data, and for each row the recipe that measures ours.

Tables stand in YAML files, one a paper: what they print is facts. Everything here is plain data: no model, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import yaml

from freemoe.core.registry import Registry, unknown_name

ScaleName = Literal["tiny", "small", "paper"]

SCALES: dict[str, str] = {
    "tiny": "the bundled models and tasks, in minutes",
    "small": "a real model of 135M parameters and real data",
    "paper": "the paper's own model and data",
}


@dataclass(frozen=True)
class Scene:
    """Where a table is measured: a key of `SCALES`, and what takes the place of the scale's own, or of the recipe's."""

    scale: ScaleName = "tiny"
    model: str | None = None
    data_root: Path | None = None
    limit: int | None = None  # documents per task and split, or blocks of text
    seed: int = 0
    threads: int | None = None
    allow_code: bool | Literal["unsafe"] = False  # whether programs that the model writes may run in the sandbox
    profile: str | None = None
    device: str | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Measured:
    """Our figure for one field of a table, in the column's unit."""

    value: float  # on documents that chose nothing
    gain: float | None = None  # to the base on the same documents
    low: float | None = None  # of the 95 % interval of the gain where there is one, else of the value
    high: float | None = None
    oracle: float | None = None  # by the paper's own protocol, where that differs: selected on the test split

    @classmethod
    def of(cls, row: Mapping[str, Any], is_first: bool, oracle: float | None = None) -> Measured:
        """A row of an evaluation: ``score``, and its ``gain`` unless it is the first, which the others are held against."""
        gain = row["gain"]
        return cls(row["score"]) if is_first else cls(row["score"], gain["mean"], gain["low"], gain["high"], oracle)


@dataclass(frozen=True)
class Way:
    """How the rows of a table are measured; paths as ``package.module:function``, loaded when a row is measured.

    ``scaled(recipe: dict, scene: Scene, tasks: dict) -> dict`` cuts the paper's recipe down to a scale; what it puts under
    ``arguments`` goes to ``work``, after which the row's own. It loads no torch.
    ``work(recipe: Recipe, folder: Path, progress: Progress, **arguments) -> dict`` carries it out and writes below ``folder``,
    where a killed run goes on; it returns what is kept of it, JSON.
    ``read(record: dict, row: Row) -> {column: Measured}``, or of rows that only the record knows, label -> that.
    """

    scaled: str
    work: str
    read: str


@dataclass(frozen=True)
class Row:
    """One row of a table.

    ``recipe`` is ``PAPER/NAME``, and several rows may show one run, each its ``pick`` of the record, which ``way.read`` knows.
    """

    label: str
    of: str = ""  # the paper's model, or task; below the scale paper what ran has a row of its own beside it
    paper: Mapping[str, float] = field(default_factory=dict)  # by column; what it leaves empty is left out
    recipe: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)  # dotted field -> value in the recipe
    arguments: Mapping[str, Any] = field(default_factory=dict)  # more keyword arguments of way.work
    pick: str = ""
    way: Way | None = None
    absent: str = ""  # why nothing of ours stands here; then there is no recipe

    @property
    def name(self) -> str:
        """What it is a row of, and its label."""
        return f"{self.of}, {self.label}" if self.of else self.label


@dataclass(frozen=True)
class Table:
    """A table or a figure of a paper."""

    name: str  # mode/table03, tomoe/figure04
    title: str
    columns: Mapping[str, str] = field(default_factory=dict)  # column -> unit, behind the numbers
    ours: Mapping[str, str] = field(default_factory=dict)  # columns that only ours fills
    rows: tuple[Row, ...] = ()
    tasks: Mapping[str, str] = field(default_factory=dict)  # column -> task that is scored at the paper's own scale
    states: Mapping[str, str] = field(default_factory=dict)  # column -> what the paper says of it, for `check.Stated`
    differs: Mapping[str, str] = field(default_factory=dict)  # column -> why ours at the paper's own scale is not that
    notes: str = ""  # what the paper does, or leaves open
    absent: str = ""  # why nothing of it runs, e.g. a drawing
    picture: str = ""  # package.module:function of (filled: dict) -> SVG
    picture_alone: bool = False  # the rows are the picture's data, too many to print

    @property
    def paper(self) -> str:
        """The folder it stands in."""
        return self.name.partition("/")[0]

    @property
    def runs(self) -> tuple[Row, ...]:
        """Rows that are measured."""
        return tuple(r for r in self.rows if r.recipe)

    def status(self) -> str:
        """In a word or two, for lists: what runs, and what is not there."""
        if self.absent:
            return f"not there: {self.absent}"
        missing = len(self.rows) - len(self.runs)
        return "runs" if not missing else f"{len(self.runs)} of {len(self.rows)} rows run"


NOT_HERE = "a method that is not here; the paper's number alone"

PAPERS: Registry[str] = Registry("paper")
"""Name of a paper -> the file beside this one with its tables and figures."""
PAPERS.add("mode", "mode/mode.yaml", "MoDE: domain experts (DENoise)")
PAPERS.add("free-moe", "mode/free_moe.yaml", "Free-MoE: domain experts (DOWP)")
PAPERS.add("tomoe", "tomoe/tables.yaml", "ToMoE: a dense model as a mixture")
PAPERS.add("hookmoe", "hookmoe/tables.yaml", "HookMoE: fewer experts per token, and small hooks")


@cache
def all_tables() -> dict[str, Table]:
    """Every table and figure by its name, paper by paper."""
    tables = [table for paper in PAPERS for table in _read_tables(paper)]
    return {table.name: table for table in tables}


def _read_tables(paper: str) -> list[Table]:
    """A paper's tables: entries with the fields of `Table`; ``each`` holds what all rows of a table share.

    Rows are entries with the fields of `Row`, whose ``paper`` may be a list: numbers of the table's first columns. Or they are
    ``by``, a function at ``package.module:name`` that returns such entries, and its keyword arguments. The fields of `Way`
    stand in a row, else in its table, else in the file, as ``notes``, ``states`` and ``tasks`` do.
    """
    whole = yaml.safe_load((Path(__file__).parent / PAPERS.get(paper)).read_text(encoding="utf-8"))
    tables = []
    for fields in whole["tables"]:
        rows, each, columns = fields.pop("rows", []), fields.pop("each", {}), fields.get("columns", {})
        if isinstance(rows, dict):
            rows = resolve_name(rows.pop("by"))(**rows)
        shared = {
            **whole["way"],
            **{name: fields.pop(name) for name in ("scaled", "work", "read") if name in fields},
            **each,
        }
        read = tuple(_read_row({**shared, **row}, columns) for row in rows)
        shared = {name: whole[name] for name in ("notes", "tasks") if name in whole}
        fields["states"] = {**whole.get("states", {}), **fields.get("states", {})}
        tables.append(Table(f"{paper}/{fields.pop('name')}", rows=read, **{**shared, **fields}))
    return tables


def _read_row(fields: dict[str, Any], columns: Mapping[str, str]) -> Row:
    numbers = fields.pop("paper", {})
    numbers = dict(zip(columns, numbers, strict=False)) if isinstance(numbers, list) else numbers
    way = Way(*(fields.pop(name, "") for name in ("scaled", "work", "read")))
    if not fields.get("recipe"):
        return Row(**{"absent": NOT_HERE, **fields, "paper": numbers})
    return Row(**{**fields, "paper": numbers, "way": way})


def find(names: list[str]) -> list[Table]:
    """The tables that are asked for, in the papers' order.

    Raises:
        UnknownNameError: When a name is none of these.
    """
    tables = all_tables()
    papers = PAPERS.names()
    for name in names:
        if name not in tables and name not in papers and name != "all":
            raise unknown_name("table", name, ["all", *papers, *tables])
    return [t for t in tables.values() if "all" in names or t.name in names or t.paper in names]
