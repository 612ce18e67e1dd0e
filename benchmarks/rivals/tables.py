"""The table of rivals: one entry per base, material, group, rival and share, paired with the base; and the figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Figure
from benchmarks.pages import grid, interval, size
from benchmarks.real_llm.cells import BASE, Cell
from benchmarks.real_llm.figures.rows import Finished, Row, as_numbers, base_of, gain, rows_of
from benchmarks.rivals.rival import RIVALS

Entry = dict[str, Any]

GROUPS = {
    "adaptation": "Adaptation: equal reference data, equal rule of stopping",
    "compression": "Compression: an equal share of the decoder's linear weights off",
}


def _rows(finished: Finished) -> list[Row]:
    return [row for group in GROUPS for row in rows_of(finished, group)]


def entries_of(finished: Finished, failed: dict[str, str], wanted: Sequence[Cell]) -> list[Entry]:
    """What is known, in the order of the plan; a rival that failed is an entry that says so."""
    rows = _rows(finished)
    found = [_entry(row, base_of(row, rows)) for row in rows]
    found += [{**_place(cell), "failed": failed[cell.name]} for cell in wanted if cell.name in failed]
    order = {(c.base, c.material, c.family): i for i, c in enumerate(reversed(wanted))}
    return sorted(found, key=lambda e: -order.get((e["base"], e["material"], e["group"]), 0))


def _place(cell: Cell) -> Entry:
    place = {"base": cell.base, "material": cell.material, "group": cell.family}
    return {**place, "rival": cell.method, "asked_off": cell.budget}


def _entry(row: Row, base: Row | None) -> Entry:
    first = row.first
    ours = RIVALS.get(row.cell.method).ours
    entry = {**_place(row.cell), "ours": ours, "kind": first["kind"], "facts": first["facts"]}
    text = row.text
    entry["figure"] = float(sum(first["nll"]) / sum(first["tokens"])) if text else 100 * float(np.mean(first["right"]))
    if base is not None and row.cell.method != BASE:
        entry["gain"] = as_numbers(gain(row, base))
    for name in ("share_off", "bytes", "numbers", "memory_bytes"):
        entry[name] = row.mean(name)
    # What all learning rates took together: none of them alone is the rival.
    entry |= {"seconds": first["seconds"] * row.rates, "rate": row.cell.rate, "rates": row.rates}
    return entry | {"documents": len(first["ids"]), "reference": sum(first["documents"].values())}


# ----------------------------------------------------------------------------------------- figures


def figures_of(finished: Finished) -> list[Figure]:
    """Per base, material, group and share: the best of ours beside the best rival, with the interval of the difference.

    Ours is chosen by the stopping loss where there is one; the rival by the reported figure, which flatters the rival.
    """
    rows = _rows(finished)
    found = []
    places = dict.fromkeys((r.cell.base, r.cell.material, r.cell.family, _share(r)) for r in rows)
    for place in places:
        mine = [r for r in rows if (r.cell.base, r.cell.material, r.cell.family, _share(r)) == place]
        rivals = [r for r in mine if r.cell.method != BASE and not RIVALS.get(r.cell.method).ours]
        ours = [r for r in mine if RIVALS.get(r.cell.method).ours]
        if ours and rivals:
            found.append(_figure(place, ours, rivals))
    return found


def _share(row: Row) -> float:
    """Rivals of compression meet at a share, those of adaptation all together."""
    return row.cell.budget if row.cell.family == "compression" else 0.0


def _figure(place: tuple[str, str, str, float], ours: Sequence[Row], rivals: Sequence[Row]) -> Figure:
    base, material, group, share = place
    best = min(ours, key=lambda r: r.stopping)
    rival = max(rivals, key=lambda r: float(np.mean(r.values())))
    apart = gain(best, rival)
    digits, unit = (3, " nats") if best.text else (1, " points")
    name = f"{group}, {Path(base).name or 'the model'}, {material}" + (f", {share:.0%} off" if share else "")
    note = (
        f"95 % [{apart.low:+.{digits}f}, {apart.high:+.{digits}f}]; {best.cell.treatment} against "
        f"{rival.cell.treatment}, the best of {len({r.cell.method for r in rivals})} rivals on the reported documents"
    )
    return Figure(f"{name}: ours above the best rival", apart.mean, None, unit=unit, digits=digits, note=note)


# ---------------------------------------------------------------------------------------- Markdown

_HEAD = ("gain [95 %]", "off", "ships", "trained or chosen", "s", "peak MB")


def markdown(details: dict[str, Any]) -> str:
    """All entries: a section per base, material and group, the best first; and what every rival is."""
    about, entries = details["rivals"], details["entries"]
    parts = [f"{details['cells']['done']} of {details['cells']['planned']} cells."]
    for place in dict.fromkeys((e["base"], e["material"], e["group"], _met_at(e)) for e in entries):
        mine = [e for e in entries if (e["base"], e["material"], e["group"], _met_at(e)) == place]
        base, material, group, share = place
        base_name = Path(base).name or details["model"]
        if group == "compression":
            if not share:
                continue
            mine += [e for e in entries if e["rival"] == BASE and (e["base"], e["material"]) == (base, material)]
        title = f"### {base_name}, {material}" + (f", {share:.0%} off" if share else "")
        known = next((e for e in mine if "documents" in e), None)
        note = f"{GROUPS[group]}." + (
            f" {known['reference']} reference documents, {known['documents']} reported." if known else ""
        )
        figure = "right" if known and known["kind"] == "task" else "nats per token"
        head = ["rival", "changes", figure, *_HEAD]
        parts += [title, note, grid(head, [_line(e, about) for e in sorted(mine, key=_rank)])]
    rows, used = [], {e["rival"] for e in entries}
    for name, row in about.items():
        if name in used:
            what, paper = (text.replace("|", "\\|") for text in (row["about"], row["paper"] or "-"))
            rows.append([f"**{name}**" if row["ours"] else name, what, paper, ", ".join(row["bases"])])
    parts += ["### What they are", grid(["rival", "what it is", "from", "bases"], rows)]
    return "\n\n".join(parts) + "\n"


def _met_at(entry: Entry) -> float:
    return entry["asked_off"] if entry["group"] == "compression" else 0.0


def _rank(entry: Entry) -> tuple[bool, float]:
    figure = entry.get("figure", 0.0)
    return "failed" in entry, figure if entry.get("kind") == "text" else -figure


def _line(entry: Entry, about: dict[str, Any]) -> list[str]:
    row = about.get(entry["rival"], {})
    name = entry["rival"] + (
        f" {entry['asked_off']:.0%}" if entry["group"] == "adaptation" and entry["asked_off"] else ""
    )
    name = f"**{name}**" if row.get("ours") else name
    if "failed" in entry:
        failed = " ".join(entry["failed"].split()).replace("|", "/")[:160]
        return [name, row.get("changes", ""), f"failed: {failed}"]
    text = entry["kind"] == "text"
    shown = f"{entry['figure']:.3f}" if text else f"{entry['figure']:.1f} %"
    rate = f" (lr {entry['rate']:g}, best of {entry['rates']})" if entry["rate"] else ""
    return [
        name + rate,
        row.get("changes", ""),
        shown,
        interval(entry.get("gain"), 3 if text else 1),
        f"{entry['share_off']:.1%}" if entry["share_off"] else "",
        size(entry["bytes"]),
        f"{entry['numbers']:,.0f}" if entry["numbers"] else "",
        f"{entry['seconds']:.0f}",
        f"{entry['memory_bytes'] / 1e6:.0f}",
    ]
