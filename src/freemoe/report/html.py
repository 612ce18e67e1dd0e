"""One self-contained page from a result: no script, no font, no picture or style from anywhere else.

The same result gives the same bytes. Every number of the tables stands in a ``<data value="...">`` element, whose
value is the result's own and whose text is rounded for people.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from freemoe.core.files import write_atomic
from freemoe.domain_experts.prove.card import ROWS
from freemoe.report.figures.all_figures import svgs
from freemoe.report.figures.drawing import ROW_COLOURS
from freemoe.report.reading import (
    COMPARED,
    READINGS,
    abstentions,
    accepted,
    better,
    check_result,
    digits_of,
    domain_sentence,
    interval_of,
    is_text,
    load_result,
    number,
    overview,
    percent,
)

REPORT = "report.html"


def render(result: dict[str, Any]) -> str:
    """The page of a result.

    Args:
        result: What stands in ``result.json``.

    Raises:
        ArtifactError: When no report can be made of it.
    """
    check_result(result)
    environment = Environment(
        loader=PackageLoader("freemoe.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent}
    environment.globals |= {
        "ROWS": ROWS,
        "COMPARED": COMPARED,
        "READINGS": READINGS,
        "COLOURS": ROW_COLOURS,
        "is_text": is_text,
        "interval_of": interval_of,
        "digits_of": digits_of,
        "better": better,
        "accepted": accepted,
        "abstentions": abstentions,
    }
    return environment.get_template("template.html.j2").render(
        result=result,
        overview=overview(result),
        sentences=[(_state(d), domain_sentence(result, d)) for d in result["domains"]],
        shown_rows=[n for n in ROWS if any(n in d["rows"] for d in result["domains"])],
        kept_base=[(d, s) for d in result["domains"] for s in d["subdomains"] if s["chosen"] == "base"],
        forecasts=[(s["name"], s["forecast"]) for d in result["domains"] for s in d["subdomains"] if s.get("forecast")],
        pictures=[(picture, Markup(svg)) for picture, svg in svgs(result)],
        facts=_facts(result),
        recipe=yaml.safe_dump(result["recipe"], sort_keys=False, allow_unicode=True, width=100),
    )


def write_report(folder: str | Path) -> Path:
    """Read a folder's ``result.json`` and write ``report.html`` beside it, whole or not at all.

    Args:
        folder: A finished artefact.

    Returns:
        The page.

    Raises:
        ArtifactError: When there is no result, it is damaged, or the page cannot be written.
    """
    page = render(load_result(folder))
    path = Path(folder)
    path = (path.parent if path.suffix == ".json" else path) / REPORT
    write_atomic(path, page.encode())
    return path


def _state(domain: dict[str, Any]) -> str:
    """How a headline is marked: better, worse, or the same as the base."""
    if not accepted(domain):
        return "same"
    return {1: "better", 0: "same", -1: "worse"}[better(domain["rows"]["expert"], is_text(domain))]


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Provenance: what made the result, of what, where and at what cost."""
    base, machine, cost = result["base"], result["environment"], result["cost"]
    packages = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())
    found = [
        ("base", str(base["name"]) + (f" @ {base['revision']}" if base.get("revision") else "")),
        ("base fingerprint", str(base["fingerprint"])),
        (
            "base layout",
            f"{base['model_type']}, {base['layers']} layers, {base['parameters']:,} parameters, of which "
            f"{base['weights']:,} may be switched off; {base['dtype']}",
        ),
        ("made with", f"freemoe {result.get('freemoe', '?')}"),
        ("created", str(result.get("created", "–"))),
        ("seed", str(result["recipe"].get("seed", "–"))),
        ("Python", str(machine.get("python", "–"))),
        ("packages", packages or "–"),
        ("machine", f"{machine.get('platform', '–')}, {machine.get('cpu', '–')}, {machine.get('cores', '–')} cores"),
        ("wall time", _duration(cost["wall_seconds"])),
        ("peak memory", _bytes(cost["peak_memory_bytes"])),
        ("experts and router on disk", _bytes(cost["artefact_bytes"])),
        ("units of work", f"{cost['units_done']} done, {cost['units_reused']} taken from an earlier run"),
    ]
    return found


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _bytes(size: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
