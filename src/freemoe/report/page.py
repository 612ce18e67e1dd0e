"""The page that all reports share: one template, one file that needs no other, and what a system has to say to fill it.

Verdict, table, how to read it, pictures, splits, provenance, recipe: a system's room gives them as a `ReportPage`. The same result gives the
same bytes, and there is no script in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from freemoe.core import neutral
from freemoe.core.files import write_atomic
from freemoe.core.ledger import openings_text
from freemoe.core.run.lock import output_lock
from freemoe.evals.held_out import record_text
from freemoe.evals.verdict import GainVerdict, State, groups_text
from freemoe.report import reading
from freemoe.report.figures.drawing import ReportFigure
from freemoe.report.palette import theme_css
from freemoe.results import EvaluationResult, RunResult, read_result, wrap_display_errors
from freemoe.results.common import SeenRecord

REPORT = "report.html"


def intervals_text(groups: int | None) -> str:
    """How the intervals of a verdict against the model are made, for the words below a table.

    An older version divided by blocks, without groups.
    """
    speed = "Speed is the geometric mean over requests in turns, with Student's 95 % interval."
    return f"95 % intervals {groups_text(groups)}. {speed}"


STATES: dict[int, State] = {1: "better", 0: "same", -1: "worse"}
MOST_NAMED = 4
"""Comparisons that a verdict names."""


def judge_comparisons(compared: Sequence[tuple[State, str]], than: str, of: str) -> GainVerdict | None:
    """The verdict on comparisons, if any is reliably better or worse.

    ``than`` is said behind better and worse; ``of`` is how many comparisons there are, in words.
    """
    good, bad = ([words for state, words in compared if state == wanted] for wanted in ("better", "worse"))
    named, more = "; ".join((good + bad)[:MOST_NAMED]), len(good + bad) - MOST_NAMED
    named += f"; and {more} more below" if more > 0 else ""
    if good:
        label = "Reliable gain" if len(good) == len(compared) else "Reliable gain in part"
        worse = f", worse in {len(bad)}" if bad else ""
        return GainVerdict("better", label, f"Yes: better{than} in {len(good)} of {of}{worse}: {named}.")
    if bad:
        return GainVerdict("worse", "Worse than the base", f"No: worse{than} in {len(bad)} of {of}: {named}.")
    return None


@dataclass(frozen=True)
class TableGroup:
    """Rows of a table that belong together."""

    # Role of each (a name of `palette.COLOURS`, or None) and its cells as text; an empty cell is left out on a phone
    rows: Sequence[tuple[str | None, Sequence[str]]]
    title: str = ""  # Above them
    about: str = ""  # Beside the title


@dataclass(frozen=True)
class PageTable:
    """A plain table; its first column names the rows."""

    about: str  # What it shows
    header: Sequence[str]  # Names of the columns
    groups: Sequence[TableGroup]  # Its rows
    numeric: Sequence[int]  # Which columns hold numbers


@dataclass(frozen=True)
class ReportPage:
    """What a report says, part by part."""

    title: str  # Heading
    about: str  # One soft line below it
    verdict: GainVerdict  # The answer
    heading: str  # Above the table
    reading: str  # How to read the table, in a few sentences
    readings: Sequence[tuple[str, str | None, str]]  # Row, its role or None, and what it may be read as
    facts: Sequence[tuple[str, str]]  # Provenance: name and fact
    table: PageTable | None = None  # None where the template has tables of its own
    findings: Sequence[tuple[State, str]] = ()  # More sentences, each with how it is marked
    splits: Sequence[str] = ()  # Which text did what
    parts: Sequence[tuple[str, str, Sequence[str]]] = ()  # The same part by part: name, words, notes
    pictures: Sequence[ReportFigure] = ()  # To be drawn
    figures_in: str = "result.json"  # The file with every figure of the page
    more_sections: Sequence[tuple[str, str]] = ()  # Anchors and names of the template's own sections


def render_page(
    page: ReportPage, result: RunResult | EvaluationResult, template: str = "plain.html.j2", **more: Any
) -> str:
    """The page of a result as HTML."""
    environment = Environment(
        loader=PackageLoader("freemoe.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Beside what HTML reads, which autoescape does: what turns writing around, or has no glyph.
        finalize=lambda value: (
            neutral.escape_terminal(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
    )
    environment.filters |= {"number": reading.format_number, "percent": reading.format_percent}
    environment.globals |= {name: getattr(reading, name) for name in _READERS}
    pictures = [(picture, *svgs) for picture in page.pictures if (svgs := picture.svgs(result))]
    recipe = yaml.safe_dump(result.recipe, sort_keys=False, allow_unicode=True, width=100)
    sections = [("verdict", "Verdict"), ("scores", "Scores"), ("reading", "How to read it"), *page.more_sections]
    sections += [("pictures", "Pictures")] if pictures else []
    sections += [("splits", "Splits"), ("provenance", "Provenance"), ("recipe", "Recipe")]
    return environment.get_template(template).render(
        page=page,
        notes=[*getattr(result, "notes", ()), *openings_text(result.cost.openings)],
        recipe=recipe,
        sections=sections,
        pictures=pictures,
        colours=Markup(theme_css()),
        recipe_link=Markup("data:text/yaml;charset=utf-8," + quote(recipe)),
        result=result,
        **more,
    )


_READERS = ("interval_of", "better")


def write_page(source: str | Path, page: Callable[[Any], str], target: Path | None = None) -> Path:
    """Read a result and write its page, whole or not at all. Without a target it is ``report.html`` in the artefact.

    Raises:
        ArtifactError: When there is no result, it is damaged, or the page cannot be written.
    """
    path = Path(source)
    target = target or (path.parent if path.suffix == ".json" else path) / REPORT
    result = read_result(path)
    with wrap_display_errors(path), output_lock(target):
        write_atomic(target, page(result).encode())
    return target


def common_facts(result: RunResult | EvaluationResult) -> list[tuple[str, str]]:
    """Provenance that every kind of run has: versions, date, seed, machine, time."""
    machine, recipe = result.environment, result.recipe
    packages = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())
    found = [
        ("made with", f"freemoe {result.freemoe}"),
        ("command", f"freemoe {recipe.get('command', 'build')}; again with freemoe run recipe.yaml"),
        ("created", result.created),
        ("seed", str(recipe.get("seed", "–"))),
        ("Python", str(machine.get("python", "–"))),
        ("packages", packages or "–"),
        ("machine", f"{machine.get('platform', '–')}, {machine.get('cpu', '–')}, {machine.get('cores', '–')} cores"),
    ]
    if isinstance(result, RunResult):
        cost = result.cost
        found += [
            ("wall time", format_duration(cost.wall_seconds)),
            ("peak memory", format_size(cost.peak_memory_bytes)),
            ("units of work", f"{cost.units_done} done, {cost.units_reused} taken from an earlier run"),
        ]
    return found


def record_line(seen: SeenRecord | None) -> str:
    """What the artefact carries of what its making saw."""
    return record_text(seen).replace("`", "")


def provenance_line(result: RunResult | EvaluationResult, *more: str) -> str:
    """One line: version, day and time, seed, and what else."""
    when = result.created.replace("T", " ")[:16]
    seed = result.recipe.get("seed")
    parts = (f"freemoe {result.freemoe}", when and f"{when} UTC", "" if seed is None else f"seed {seed}", *more)
    return " · ".join(part for part in parts if part)


def format_duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours and minutes."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def format_size(count: float) -> str:
    """Bytes in a unit that people read."""
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
