"""Write the table of figures in `docs/benchmarks.md` from what the benchmarks left in `docs/benchmarks/`.

First: python -m benchmarks all --data-root FOLDER -o docs/benchmarks
and: FREEMOE_HARDENING_OUT=docs/benchmarks make hardening
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import BENCHES, HARDENING

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks"
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


def results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """What `python -m benchmarks` wrote, in the order of its own table, and `make hardening`; of several machines all files."""
    paths = [
        p
        for name in (*BENCHES, *HARDENING)
        # A name may begin with another's.
        for p in (folder / f"{name}.json", *(p for p in sorted(folder.glob(f"{name}-*.json")) if p.stem not in BENCHES))
    ]
    return [{**json.loads(p.read_text(encoding="utf-8")), "bench": p.stem} for p in paths if p.exists()]


def table(found: list[dict[str, Any]]) -> str:
    """A table with one row per figure that has a target, and the machine below it."""
    lines = ["| benchmark | figure | measured | target | |", "|---|---|---|---|---|"]
    for result in found:
        for figure in result["figures"]:
            if figure["target"] is None:
                continue
            value = figure["value"]
            measured = "not measured" if value is None else f"{value:.{figure['digits']}f}{figure['unit']}"
            sign = "≥" if figure["better"] == "higher" else "≤"
            target = f"{sign} {figure['target']:g}{figure['unit']}"
            name = figure["name"].replace("|", "/")
            verdict = "**missed**" if figure["verdict"] == "missed" else figure["verdict"]
            lines.append(f"| `{result['bench']}` | {name} | {measured} | {target} | {verdict} |")
    machine = found[0]["environment"]
    versions = ", ".join(f"{p} {machine['packages'][p]}" for p in ("torch", "transformers", "lm-eval"))
    minutes = sum(r["seconds"] for r in found) / 60
    lines += ["", f"{machine['cpu']}, {machine['cores']} cores; {versions}; {minutes:.0f} minutes in all."]
    lines += [
        f"`{r['bench']}`: {r['environment']['cpu']}, {r['environment']['cores']} cores."
        for r in found
        if r["environment"]["cpu"] != machine["cpu"]
    ]
    absent = [f"`{name}`" for name in (*BENCHES, *HARDENING) if name not in [r["bench"] for r in found]]
    if absent:
        lines.append(f"Not run in full yet: {', '.join(absent)}.")
    return "\n".join(lines)


def rendered(page: str, found: list[dict[str, Any]]) -> str:
    """The page with its table made anew."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(found)}\n{END}{after}"


def main() -> None:
    """Write the table into the page."""
    page = ROOT / "docs" / "benchmarks.md"
    page.write_text(rendered(page.read_text(encoding="utf-8"), results()), encoding="utf-8")


if __name__ == "__main__":
    main()
