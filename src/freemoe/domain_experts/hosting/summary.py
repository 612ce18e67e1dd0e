"""What there is to say of the experts on a base: per expert a row of plain data, and a table of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freemoe.domain_experts.expert import DomainExpert
from freemoe.domain_experts.result import BuildResult
from freemoe.models.mask import Mask
from freemoe.models.weights import WeightMatrix
from freemoe.recipes.expert_names import BASE
from freemoe.report.reading import gain_text
from freemoe.results import read_result


def expert_row(
    expert: DomainExpert, mask: Mask, weights: list[WeightMatrix], measurements: dict[str, Any] | None
) -> dict[str, Any]:
    """One expert.

    Returns:
        ``name``, ``kind``, ``off`` (single weights), ``share`` of all weights, ``bytes`` of its tensors on disk, ``accepted`` (by the
        guard; None where no build tells and something is off), ``verdict``, and ``gain``: mean, low and high end of its 95 % interval on held-out
        documents, with its ``unit``.
    """
    measurements = measurements or {}
    return {
        "name": expert.name,
        "kind": expert.kind,
        "off": mask.count,
        "share": mask.off_share(weights),
        "bytes": sum(t.numel() * t.element_size() for t in expert.to_tensors().values()),
        "accepted": False if expert.kind == BASE else measurements.get("accepted"),
        "verdict": measurements.get("verdict"),
        "gain": measurements.get("gain"),
    }


def read_measurements(artefact: Path) -> dict[str, dict[str, Any]]:
    """What the result of a build says of its experts, by name: ``accepted``, ``verdict``, ``gain``; empty without a result."""
    if not (artefact / "result.json").is_file():
        return {}
    found = {}
    for domain in read_result(artefact, BuildResult).domains:
        for sub in domain.subdomains:
            row = sub.rows.get("expert")
            gain = None
            if row is not None and (seen := row.ratio if domain.is_text else row.gain):
                gain = {**seen.model_dump(), "unit": domain.unit, "text": gain_text(row, domain.unit)}
            found[sub.name] = {"accepted": sub.chosen != "base", "verdict": sub.verdict, "gain": gain}
    return found


def as_table(rows: list[dict[str, Any]], active: str) -> str:
    """Rows of `expert_row` as lines of text; the expert that is switched in has a star."""
    said = {True: "accepted", False: "rejected", None: "-"}
    cells = [("expert", "kind", "weights off", "bytes", "guard", "held-out gain [95 %]")]
    for row in rows:
        gain = "-" if row["gain"] is None else f"{row['gain']['text']} {row['gain']['unit']}"
        name = f"{row['name']} *" if row["name"] == active else row["name"]
        cells.append((name, row["kind"], f"{row['share']:.3%}", f"{row['bytes']:,}", said[row["accepted"]], gain))
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
