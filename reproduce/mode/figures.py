"""The figures of MoDE and Free-MoE; what their text prints no numbers for is drawn from ours alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reproduce.mode import numbers as paper
from reproduce.mode.tables import (
    ALL_TOKENS,
    BUNDLED,
    CODE,
    LLAMA,
    MMLU_TOKENS,
    MODELS,
    NEEDS_ALL,
    ORACLE,
    SAMPLES,
    SEVEN_B,
    UNIT,
    main_rows,
)
from reproduce.mode.work import ACCURACY, BOXES, BUILDS, FIELDS, FIVE, GAINS, five_numbers, ours_of
from reproduce.table import Needs, Row, Table

WIDTHS = {"20": 5, "10": 10, "05": 20}
"""Figure 1: width in per cent, as the recipes' names have it -> bands that cover the whole ranking."""

NO_NUMBERS = "the paper prints no numbers for its picture; bands are ours, ascending"
DRAWING = "a drawing: nothing to run"
PICTURES = "reproduce.mode.pictures"
TASKS = {7: "mmlu", 8: "gsm8k", 9: "mathqa", 10: "humaneval", 11: "mbpp"}


def _sensitivity() -> tuple[Row, ...]:
    rows = []
    for width, count in WIDTHS.items():
        changes = {
            "domains": {"mmlu": ["mmlu_philosophy"]},
            "subdomains.count": {"mmlu": 1},
            "bands.end": 1.0,
            "bands.step": int(width) / 100,
        }
        recipe = f"mode/table03-ratio-{width}"
        if not rows:
            rows.append(Row("base", {}, recipe, changes, pick="base"))
        for i in range(count):
            start, end = i * int(width), (i + 1) * int(width)
            rows.append(Row(f"{int(width)} %, {start}-{end} %", {}, recipe, changes, pick=f"{start / 100:.2f}"))
    return tuple(rows)


def _improved() -> tuple[Row, ...]:
    changes = {"subdomains": {"by": "field", "min_size": 2}, "bands.end": 1.0, "bands.step": 0.1}
    return tuple(
        Row(f"{10 * i}-{10 * i + 10} %", {}, "mode/table03-ratio-10", changes, pick=f"{i / 10:.2f}") for i in range(10)
    )


def _boxes() -> tuple[Row, ...]:
    return tuple(
        Row(
            f"{name}, {called}",
            five_numbers(list(paper.gains(model, pick).values())),
            f"mode/table01-{model}",
            pick=pick,
        )
        for model, name in MODELS.items()
        for pick, called in (("expert", "DENoise"), ("routed", "MoDE"))
    )


def _accuracy(changes: Mapping[str, Any]) -> tuple[Row, ...]:
    """Every task under every band; theirs from Tables 7 to 11."""
    rows = []
    for number, task in TASKS.items():
        for metric in ("pass@1", "pass@10") if number > 9 else ("",):
            name = f"{task} {metric}".strip()
            recipe = f"mode/table{number:02d}-{task}"
            own = {**changes, **({"data.pass_at": 10} if metric == "pass@10" else {})}
            base = {"accuracy": paper.MAIN["llama-2-7b"]["base"][name]}
            rows.append(Row(f"{name}, no band", base, recipe, own, pick="base"))
            for band in paper.BANDS:
                theirs = {"accuracy": paper.under_one_band(name, band)}
                rows.append(Row(f"{name}, {band} %", theirs, recipe, own, pick=ours_of(band)))
    return tuple(rows)


def accuracy_figure(name: str, changes: Mapping[str, Any], protocol: str) -> Table:
    """MoDE Figure 5, Free-MoE Figure 6."""
    rows = _accuracy(changes)
    return Table(
        name=name,
        title="accuracy of every benchmark under every band, all clusters together",
        columns={"accuracy": UNIT},
        rows=rows,
        way=ACCURACY,
        protocol=f"theirs: Tables 7 to 11, weighted by samples, as no numbers are printed{protocol}",
        approximated=BUNDLED,
        needs=Needs(LLAMA, SEVEN_B, ALL_TOKENS / len(rows), CODE),
        picture=f"{PICTURES}:accuracy",
        picture_alone=True,
    )


def gain_rows(changes: Mapping[str, Any]) -> tuple[Row, ...]:
    """Free-MoE Figure 5: Table 1's gains."""
    return tuple(
        Row(f"{name}, {called}", paper.gains(model, pick), f"mode/table01-{model}", changes, pick=pick)
        for model, name in MODELS.items()
        for pick, called in (("expert", "DOWP"), ("routed", "Free-MoE"))
    )


def drawing(name: str, title: str) -> Table:
    """A figure that shows no measurement."""
    return Table(name=name, title=title, absent=DRAWING)


FIGURES: tuple[Table, ...] = (
    Table(
        name="mode/figure01",
        title="accuracy on MMLU Philosophy over the whole ranking, in bands of 5, 10 and 20 %",
        columns={"accuracy": UNIT},
        rows=_sensitivity(),
        way=ACCURACY,
        protocol=NO_NUMBERS,
        approximated={s: said.replace("a quarter of the subdomains", "no subdomains") for s, said in BUNDLED.items()},
        needs=Needs(LLAMA, SEVEN_B, (311 + 34) * 750 * 38 / 36),
        picture=f"{PICTURES}:sensitivity",
        picture_alone=True,
    ),
    Table(
        name="mode/figure02",
        title="how many tasks each band of 10 % improves",
        columns={"improved": " tasks", "worse": " tasks", "tasks": ""},
        rows=_improved(),
        way=FIELDS,
        protocol=NO_NUMBERS + "; theirs: four models, ours: one; any difference counts",
        approximated={
            "tiny": "the fields of the three bundled domains as tasks, 120 documents of each domain",
            "small": BUNDLED["small"],
        },
        needs=Needs(LLAMA, SEVEN_B, MMLU_TOKENS / 10),
        picture=f"{PICTURES}:tally",
    ),
    drawing("mode/figure03", "the flow of an input through router and experts"),
    Table(
        name="mode/figure04",
        title="spread of the gains over benchmarks, per model, as box plots",
        columns=dict.fromkeys(FIVE, " points"),
        rows=_boxes(),
        way=BOXES,
        protocol=ORACLE.partition("; theirs as")[0] + "; theirs: the seven gains of Table 1",
        approximated={s: f"{said}; one model for all five" for s, said in BUNDLED.items()},
        needs=NEEDS_ALL,
        picture=f"{PICTURES}:gain_boxes",
    ),
    accuracy_figure("mode/figure05", {}, ""),
)


def free_moe_figures(changes: Mapping[str, Any]) -> tuple[Table, ...]:
    """Free-MoE's figures."""
    alike = {s: f"{said}; one model for all five" for s, said in BUNDLED.items()}
    whole = "; one ranking per matrix, as its text sorts"
    return (
        drawing("free-moe/figure01", "mixtures of experts of three kinds"),
        drawing("free-moe/figure02", "the two steps: purification, then routing"),
        drawing("free-moe/figure03", "the flow of an input through router and experts"),
        Table(
            name="free-moe/figure04",
            title="scores of baseline, DOWP and Free-MoE on all benchmarks, as radars",
            columns=dict.fromkeys(paper.COLUMNS, UNIT),
            rows=main_rows("DOWP", "Free-MoE", changes),
            way=BUILDS,
            protocol=f"theirs: the numbers of Table 1; {SAMPLES}{whole}",
            approximated=alike,
            needs=NEEDS_ALL,
            picture=f"{PICTURES}:radar",
            picture_alone=True,
        ),
        Table(
            name="free-moe/figure05",
            title="gains of DOWP and Free-MoE over the baseline, as bars",
            columns=dict.fromkeys(paper.COLUMNS, " points"),
            rows=gain_rows(changes),
            way=GAINS,
            protocol=f"theirs: the numbers of Table 1, chosen on the test split; ours: chosen on the reference split{whole}",
            approximated=alike,
            needs=NEEDS_ALL,
            picture=f"{PICTURES}:improvement",
            picture_alone=True,
        ),
        accuracy_figure("free-moe/figure06", changes, whole),
    )
