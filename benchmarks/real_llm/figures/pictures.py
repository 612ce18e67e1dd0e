"""The table and the pictures of `real.json`: gain against bytes, the figure against speed, gain against home or far.

Everything is drawn from the committed JSON alone, so that a picture can always be made again without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.pages import grid, interval, panels, size, svg
from freemoe.report.figures.drawing import PALETTE, SOFT, drawable_name, new_figure, report_style, set_panel_title

Entry = dict[str, Any]

_UNROUTED = (
    "Gain over the base with the expert left on everywhere. A router that keeps an expert inside its own domain makes every "
    "other column 0."
)
_MARKERS = "osD^vPX*"
_COLUMNS = 4


def tables(details: dict[str, Any]) -> str:
    """Markdown: one table per family, one row per material and method."""
    parts = [f"Base: {details['model']}; {details['cells']['done']} of {details['cells']['planned']} cells."]
    for family, title in (("text", "Text"), ("task", "Questions"), ("count", "Number of documents"), ("home", "Bases")):
        if details.get(family):
            parts += [f"## {title}", _table(details[family])]
    if details.get("forgetting"):
        parts += ["## On the other materials", _UNROUTED, _forgetting(details["forgetting"])]
    return "\n\n".join(parts) + "\n"


def _table(entries: Sequence[Entry]) -> str:
    head = ["material", "method", "figure", "gain [95 %]", "of LoRA r=1", "guard p", "off", "ships", "s", "MB"]
    rows = []
    for e in entries:
        digits = 3 if "perplexity" in e else 1
        where = "/".join(str(e[k]) for k in ("base", "material", "reference_documents") if k in e)
        speeds = "prefill_tokens_per_second" in e
        rows.append(
            [
                where,
                e["method"] + (f", lr {e['rate'][0]:g}" if "rate" in e else ""),
                f"{e['perplexity']:.2f}" if "perplexity" in e else f"{e['accuracy']:.1f} %",
                interval(e.get("gain"), digits),
                interval([v if v is None else 100 * v for v in e.get("share_of_lora_r1") or []], 0, " %", False),
                f"{e['guard']['p']:.3f}" if "guard" in e else "",
                f"{e['share_off']:.2%}" if "share_off" in e else "",
                size(e.get("bytes"), 1),
                f"{e.get('seconds', 0):.0f}",
                str(e.get("memory_mb", "")),
                f"{e['prefill_tokens_per_second']:.0f}, {e['decode_tokens_per_second']:.1f}" if speeds else "-",
            ]
        )
        if "oracle" in e:
            rows.append([where, f"{e['method']}, oracle (selected on test)", "", interval(e["oracle"]["gain"], digits)])
    return grid([*head, "prefill, decode tokens/s"], rows)


def _forgetting(entries: Sequence[Entry]) -> str:
    columns = list(dict.fromkeys(name for e in entries for name in e["gains"]))
    rows = [[f"{e['expert']}, {e['method']}", *(interval(e["gains"].get(c), 2) for c in columns)] for e in entries]
    return grid(["expert", *columns], rows)


# ---------------------------------------------------------------------------------------- pictures


def pictures(details: dict[str, Any]) -> dict[str, Callable[[], Figure | None]]:
    """Name of the file -> what draws it."""
    return {
        "real-gain-bytes": lambda: _scatter(details, lambda entry: entry.get("bytes"), "bytes shipped", True),
        "real-figure-speed": lambda: _scatter(
            details, _speed_of, "prefill, tokens/s against the base's", False, needed="prefill_against_dense"
        ),
        "real-home-or-far": lambda: home_or_far(details.get("home_or_far", [])),
    }


def _speed_of(entry: Entry) -> float | None:
    # A model that was cut is measured in turns with the whole one; any other has the base's shape, and so its speed.
    return entry.get("prefill_against_dense", 1.0) if "prefill_tokens_per_second" in entry else None


def _scatter(
    details: dict[str, Any],
    across: Callable[[Entry], float | None],
    label: str,
    logarithmic: bool,
    needed: str = "gain",
) -> Figure | None:
    """One panel per material, some of whose entries have what is ``needed``: gain with its interval over what a method costs."""
    entries = [*details.get("text", []), *details.get("task", [])]
    materials = list(dict.fromkeys(e["material"] for e in entries))
    drawn = [m for m in materials if any("gain" in e and needed in e for e in entries if e["material"] == m)]
    if not drawn:
        return None
    figure, axes = panels(len(drawn), _COLUMNS, 3.0, 2.5, (0.6, 0.8))
    kinds = list(dict.fromkeys(_kind(e) for e in entries if "gain" in e))
    for panel, material in zip(axes, drawn, strict=True):
        mine = [e for e in entries if e["material"] == material]
        _panel(panel, material, mine, across, kinds)
        panel.set_xlabel(label)
        if logarithmic:
            panel.set_xscale("log")
    handles, labels = axes[0].get_legend_handles_labels()
    for panel in axes[1:]:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            if name not in labels:
                handles, labels = [*handles, handle], [*labels, name]
    figure.legend(handles, labels, loc="outside upper left", ncols=6)
    return figure


def _kind(entry: Entry) -> str:
    return str(entry["method"]).split("-")[0]


def _panel(
    axes: Axes,
    material: str,
    entries: Sequence[Entry],
    across: Callable[[Entry], float | None],
    kinds: Sequence[str],
) -> None:
    axes.axhline(0, color=SOFT, linewidth=0.8)
    for entry in entries:
        x = across(entry) if "gain" in entry else None
        if not x:
            continue
        number = kinds.index(_kind(entry))
        mean, low, high = entry["gain"]
        colour, marker = PALETTE[number % len(PALETTE)], _MARKERS[number % len(_MARKERS)]
        seen = axes.get_legend_handles_labels()[1]
        label = _kind(entry) if _kind(entry) not in seen else None
        axes.errorbar(
            x, mean, [[mean - low], [high - mean]], fmt=marker, color=colour, markersize=5, linewidth=1, label=label
        )
        short = str(entry["method"]).partition("-")[2]
        axes.annotate(drawable_name(short), (x, mean), (4, 3), textcoords="offset points", fontsize=6.5, color=SOFT)
    unit = next((e["unit"] for e in entries if "unit" in e), "")
    set_panel_title(axes, material, f"gain, {unit}")


def home_or_far(points: Sequence[Entry]) -> Figure | None:
    """Gain over the base's own perplexity, all materials and bases: how far from home it begins, how much it gains."""
    if not points:
        return None
    with report_style():
        figure = new_figure(6.5, 4.0)
        axes = figure.subplots()
        kinds = list(dict.fromkeys(p["method"] for p in points))
        for number, kind in enumerate(kinds):
            mine = [p for p in points if p["method"] == kind]
            axes.scatter(
                [p["base_perplexity"] for p in mine],
                [p["gain"] for p in mine],
                marker=_MARKERS[number % len(_MARKERS)],
                color=PALETTE[number % len(PALETTE)],
                label=kind,
                s=24,
            )
        for place in dict.fromkeys((p["material"], p["base"], p["base_perplexity"]) for p in points):
            highest = max(p["gain"] for p in points if (p["material"], p["base"]) == place[:2])
            name = place[0] + (f" ({Path(place[1]).name})" if place[1] else "")
            axes.annotate(
                drawable_name(name), (place[2], highest), (0, 6), textcoords="offset points", fontsize=7, color=SOFT
            )
        axes.axhline(0, color=SOFT, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlabel("perplexity of the base on the material")
        axes.set_ylabel("gain, nats per token")
        axes.legend(ncols=2)
        return figure


def draw_all(details: dict[str, Any], folder: Path) -> list[Path]:
    """Write `real.md` and every picture for which there are records; the same input gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "real.md"]
    written[0].write_text(tables(details), encoding="utf-8")
    for name, draw in pictures(details).items():
        with report_style():
            figure = draw()
            if figure is None:
                continue
            drawn = svg(figure)
        written.append(folder / f"{name}.svg")
        written[-1].write_text(drawn, encoding="utf-8")
    return written
