"""What a paper's table or figure is here: its numbers as data, and for each row the recipe that measures ours.

Tables stand in YAML files, one a paper: what they print is facts. Everything here is plain data: no model, no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
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
    """Where a table is measured.

    Attributes:
        scale: A key of `SCALES`.
        model: The base; None for the scale's own.
        data_root: Folder with the real benchmark files.
        limit: Documents per task and split (builds), or blocks of text; None for the scale's own number.
        seed: Of splits, masks and training.
        threads: CPU threads.
        allow_code: Whether programs that the model writes may run in the sandbox.
        profile: Of the recipe, below ``paper`` too; None for the scale's own.
        device: Where the base is; None for the recipe's own.
        dtype: Its number format; None for the recipe's own.
    """

    scale: ScaleName = "tiny"
    model: str | None = None
    data_root: Path | None = None
    limit: int | None = None
    seed: int = 0
    threads: int | None = None
    allow_code: bool | Literal["unsafe"] = False
    profile: str | None = None
    device: str | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Measured:
    """Our figure for one field of a table.

    Attributes:
        value: In the column's unit, on documents that chose nothing.
        gain: Difference to the base on the same documents; None where the field has none.
        low: Lower end of the 95 % interval: of ``gain`` where there is one, else of ``value``.
        high: Its upper end.
        oracle: The same figure by the paper's own protocol, where that differs: selected on the test split.
    """

    value: float
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    oracle: float | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any], is_first: bool, oracle: float | None = None) -> Measured:
        """A row of an evaluation: ``score``, and its ``gain`` unless it is the first, which the others are held against."""
        gain = row["gain"]
        return cls(row["score"]) if is_first else cls(row["score"], gain["mean"], gain["low"], gain["high"], oracle)


@dataclass(frozen=True)
class Way:
    """How the rows of a table are measured; paths as ``package.module:function``, loaded when a row is measured.

    Attributes:
        scaled: ``(recipe: dict, scene: Scene) -> dict``: the paper's recipe cut down to a scale; what it puts under
            ``arguments`` goes to ``work``, after which the row's own. Loads no torch.
        work: ``(recipe: Recipe, folder: Path, progress: Progress, **arguments) -> dict``: carries it out and writes below
            ``folder``, where a killed run goes on; returns what is kept of it, JSON.
        read: ``(record: dict, row: Row) -> {column: Measured}``.
    """

    scaled: str
    work: str
    read: str


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        label: As the paper has it.
        paper: Column -> the paper's number; columns that it leaves empty are left out.
        recipe: File below ``recipes``, without suffix, whose run this row shows; several rows may show one run.
        changes: Dotted field -> value that the row changes in the recipe.
        arguments: More keyword arguments of ``Way.work``, where a recipe cannot say what is measured.
        pick: Which part of the run's record it shows: what ``Way.read`` makes of it.
        way: How it is measured, where that differs from the table's.
        absent: Why nothing of ours stands here; then ``recipe`` is empty.
    """

    label: str
    paper: Mapping[str, float] = field(default_factory=dict)
    recipe: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pick: str = ""
    way: Way | None = None
    absent: str = ""


@dataclass(frozen=True)
class Needs:
    """What the paper's own scale takes: printed before anything runs.

    Attributes:
        model: Its name on the hub.
        parameters: All of them.
        tokens: Tokens that one row sends forward through the model; a trained token counts as three.
        data: What else has to be there.
    """

    model: str
    parameters: float
    tokens: float
    data: str = ""

    @property
    def gigabytes(self) -> float:
        """Memory: weights in bfloat16 and a fifth more for activations and work."""
        return 1.2 * 2 * self.parameters / 1e9

    def hours(self, rows: int, flops: float = 1e14) -> float:
        """Hours of one accelerator that does ``flops`` useful operations per second, for so many rows."""
        return rows * 2 * self.parameters * self.tokens / flops / 3600

    def line(self, rows: int) -> str:
        """For people."""
        more = f"; {self.data}" if self.data else ""
        return (
            f"{self.model}: about {self.gigabytes:.0f} GB of accelerator memory in bfloat16 and {self.hours(rows):.1f} hours "
            f"for {rows} runs at 100 useful TFLOP/s{more}"
        )


@dataclass(frozen=True)
class Table:
    """A table or a figure of a paper.

    Attributes:
        name: ``mode/table03``, ``tomoe/figure04``.
        title: What it shows, in our words.
        columns: Column -> unit, behind the numbers.
        rows: In the paper's order.
        way: How rows are measured; None where nothing runs.
        protocol: How ours differs from theirs, in one line.
        columns_at: Scale -> the columns that are filled there, where that is not all of them.
        approximated: Scale -> what stands there in place of the paper's; scales at which nothing does are left out.
        needs: Of the paper's own scale.
        absent: Why nothing of it runs, e.g. a drawing.
        picture: ``package.module:function`` of ``(filled: dict) -> SVG`` for figures, and tables that read better so.
        picture_alone: The rows are the picture's data, too many to print.
    """

    name: str
    title: str
    columns: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    way: Way | None = None
    protocol: str = ""
    columns_at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    approximated: Mapping[str, str] = field(default_factory=dict)
    needs: Needs | None = None
    absent: str = ""
    picture: str = ""
    picture_alone: bool = False

    @property
    def paper(self) -> str:
        """The folder it stands in."""
        return self.name.partition("/")[0]

    def way_of(self, row: Row) -> Way:
        """How a row is measured.

        Raises:
            ValueError: Neither the row nor its table says.
        """
        way = row.way or self.way
        if way is None:
            raise ValueError(f"{self.name}, row {row.label!r}, has a recipe and no way to carry it out.")
        return way

    @property
    def runs(self) -> tuple[Row, ...]:
        """Rows that are measured."""
        return tuple(r for r in self.rows if r.recipe)

    def filled_at(self, scale: str) -> tuple[str, ...]:
        """Columns that are filled at a scale."""
        return tuple(self.columns_at.get(scale, self.columns))

    def status(self) -> str:
        """In a word or two, for lists: what runs, what is approximated, what is not there."""
        if self.absent:
            return f"not there: {self.absent}"
        missing = len(self.rows) - len(self.runs)
        text = "runs" if not missing else f"{len(self.runs)} of {len(self.rows)} rows run"
        return text + ("; approximated at " + ", ".join(self.approximated) if self.approximated else "")


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
    ``by``, a function at ``package.module:name`` that returns such entries, and its keyword arguments.
    """
    text = (Path(__file__).parent / PAPERS.get(paper)).read_text(encoding="utf-8")
    tables = []
    for fields in yaml.safe_load(text)["tables"]:
        rows, each, columns = fields.pop("rows", []), fields.pop("each", {}), fields.get("columns", {})
        if isinstance(rows, dict):
            rows = load_function(rows.pop("by"))(**rows)
        name, way, needs = f"{paper}/{fields.pop('name')}", fields.pop("way", None), fields.pop("needs", None)
        tables.append(
            Table(
                name,
                rows=tuple(_read_row({**each, **row}, columns) for row in rows),
                way=way and Way(**way),
                needs=needs and Needs(**needs),
                **fields,
            )
        )
    return tables


def _read_row(fields: dict[str, Any], columns: Mapping[str, str]) -> Row:
    numbers, way = fields.get("paper", {}), fields.get("way")
    numbers = dict(zip(columns, numbers, strict=False)) if isinstance(numbers, list) else numbers
    return Row(**{**fields, "paper": numbers, "way": way and Way(**way)})


def find(names: list[str]) -> list[Table]:
    """The tables that are asked for, in the papers' order.

    Args:
        names: Of tables; ``all``; or of a paper, for all of its tables.

    Raises:
        UnknownNameError: When a name is none of these.
    """
    tables = all_tables()
    papers = PAPERS.names()
    for name in names:
        if name not in tables and name not in papers and name != "all":
            raise unknown_name("table", name, ["all", *papers, *tables])
    return [t for t in tables.values() if "all" in names or t.name in names or t.paper in names]


def load_function(path: str) -> Callable[..., Any]:
    """The function at ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
