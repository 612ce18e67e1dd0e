"""The tables of MoDE and Free-MoE, which describe one system: the papers' numbers, and the recipes that measure ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reproduce.mode import numbers as paper
from reproduce.mode.work import BUILDS, SWEEPS, ours_of
from reproduce.table import Needs, Row, Table

ORACLE = (
    "theirs: the best of ten bands per cluster, chosen on the test split; ours: chosen on the reference split, reported on "
    "test; theirs as a protocol: ours under oracle"
)
SAMPLES = ORACLE + "; pass@10 from ten samples at temperature 0.8, top-p 0.95 (theirs are not said)"
TWO = "the bundled model and tasks of the same kind (general for MMLU, math for GSM8K and MathQA, targets that are sampled for MBPP "
BUNDLED = {
    "tiny": TWO
    + "and HumanEval, so that columns of one kind are one measurement), 120 documents, 48 with sampled ones, a quarter of the subdomains",
    "small": "a model of 135M parameters, 200 documents per task and split, 32 where answers are generated",
}
LLAMA, SEVEN_B = "meta-llama/Llama-2-7b-chat-hf", 6.74e9
CODE = "programs that the model writes are run (--allow-code-execution)"

# Tokens: documents of both splits under the base and ten bands.
MMLU_TOKENS = (14_042 + 1_531) * 750 * 11
GSM8K_TOKENS = (1_319 + 7_473) * 350 * 11
MATHQA_TOKENS = (2_985 + 4_475) * 5 * 90 * 11
CODE_TOKENS = (500 + 90 + 164 + 90) * 10 * 500 * 11
ALL_TOKENS = MMLU_TOKENS + GSM8K_TOKENS + MATHQA_TOKENS + CODE_TOKENS

UNIT = " %"
MODELS = {
    "llama-2-7b": "llama-2-7b-chat",
    "llama-2-13b": "llama-2-13b-chat",
    "llama-2-70b": "llama-2-70b-chat",
    "gemma-7b": "gemma-7b",
    "gemma-2-9b": "gemma-2-9b",
}
# Fifteen rows show five runs, of models of these sizes.
NEEDS_ALL = Needs(
    "the largest of five, meta-llama/Llama-2-70b-chat-hf",
    69e9,
    ALL_TOKENS * (6.74 + 13.0 + 69.0 + 8.5 + 9.2) / 69 / 15,
    CODE,
)


def main_rows(expert: str, mixture: str, changes: Mapping[str, Any]) -> tuple[Row, ...]:
    """Table 1: every model's baseline, experts and mixture."""
    called = {"base": "baseline", "expert": expert, "routed": mixture}
    return tuple(
        Row(f"{name}, {called[pick]}", found[pick], f"mode/table01-{model}", changes, pick=pick)
        for model, name in MODELS.items()
        for found in [paper.MAIN[model]]
        for pick in called
    )


def _base(recipe: str, *columns: str, **changes: Any) -> Row:
    own = {c: paper.MAIN["llama-2-7b"]["base"][c] for c in columns}
    return Row("base", own, recipe, changes, pick="base")


def _norms() -> tuple[Row, ...]:
    rows = []
    for p in ("1", "2", "4", "inf"):
        own = paper.NORMS.get(p, {})
        mmlu = {c: v for c, v in own.items() if c == "mmlu"}
        maths = {c: v for c, v in own.items() if c != "mmlu"}
        more = "" if own else " (ours alone)"
        rows.append(Row(f"p = {p}, MMLU{more}", mmlu, f"mode/table02-p-{p}-general", pick="expert"))
        rows.append(Row(f"p = {p}, GSM8K and MathQA{more}", maths, f"mode/table02-p-{p}-math", pick="expert"))
    return tuple(rows)


CODE_COLUMNS = tuple(c for c in paper.COLUMNS if "pass@" in c)


def sweep(number: int, task: str, tokens: float, figure: str = "") -> Table:
    """Tables 7 to 11: one task's clusters under every band, together and the largest and the smallest alone."""
    metrics = ("pass@1", "pass@10") if "pass@" in figure else ("",)
    rows: list[Row] = []
    for metric in metrics:
        name = f"{task} {metric}".strip()
        clusters = sorted(paper.CLUSTERS[name], key=lambda cluster: -cluster[0])
        ends = {"largest": clusters[0][1], "smallest": clusters[-1][1]}
        recipe, before = f"mode/table{number:02d}-{task}", f"{metric}, " if metric else ""
        changes = {"data.pass_at": 10} if metric == "pass@10" else {}
        base, chosen = paper.MAIN["llama-2-7b"]["base"][name], paper.under_best_bands(name)
        rows.append(Row(f"{before}no band", {"all": base}, recipe, changes, pick="base"))
        for band in paper.BANDS:
            found = {"all": paper.under_one_band(name, band), **{end: own[band] for end, own in ends.items()}}
            rows.append(Row(f"{before}{band} %", found, recipe, changes, pick=ours_of(band)))
        best = {"all": chosen, **{end: max(own.values()) for end, own in ends.items()}}
        rows.append(Row(f"{before}each cluster's best band", best, recipe, changes, pick="expert"))
    return Table(
        name=f"mode/table{number:02d}",
        title=f"every cluster of {task} under every band: all of them (weighted by samples), the largest, the smallest",
        columns=dict.fromkeys(("all", "largest", "smallest"), UNIT),
        rows=tuple(rows),
        way=SWEEPS,
        protocol=(SAMPLES if figure else ORACLE) + "; k-means on other documents gives other clusters",
        approximated=BUNDLED,
        needs=Needs(LLAMA, SEVEN_B, tokens / len(rows), CODE if figure else ""),
    )


def _of_bands() -> tuple[Table, ...]:
    """Tables 2 to 4: norm, width, sublayers."""
    return (
        Table(
            name="mode/table02",
            title="the norm of the inputs in |W| * ||X||_p",
            columns=dict.fromkeys(("mmlu", "gsm8k", "mathqa"), UNIT),
            rows=_norms(),
            way=BUILDS,
            protocol=ORACLE + "; the paper's column GSM8K cannot be read in the text that we have",
            approximated=BUNDLED,
            needs=Needs(LLAMA, SEVEN_B, (MMLU_TOKENS + GSM8K_TOKENS + MATHQA_TOKENS) / 2),
        ),
        Table(
            name="mode/table03",
            title="width of a band: share of each row's weights that is switched off, on MMLU",
            columns={"mmlu": UNIT},
            rows=(
                _base("mode/table03-ratio-10", "mmlu"),
                *(
                    Row(f"{share} %", {"mmlu": score}, f"mode/table03-ratio-{share:>02}", pick="expert")
                    for share, score in paper.RATIOS.items()
                ),
            ),
            way=BUILDS,
            protocol=ORACLE,
            approximated=BUNDLED,
            needs=Needs(LLAMA, SEVEN_B, MMLU_TOKENS),
        ),
        Table(
            name="mode/table04",
            title="which linears lose weights: those of the MLP, of attention, or both",
            columns=dict.fromkeys(("gsm8k", "mathqa"), UNIT),
            rows=(
                _base("mode/table04-both", "gsm8k", "mathqa"),
                *(Row(name, own, f"mode/table04-{name}", pick="expert") for name, own in paper.SUBLAYERS.items()),
            ),
            way=BUILDS,
            protocol=ORACLE,
            approximated=BUNDLED,
            needs=Needs(LLAMA, SEVEN_B, GSM8K_TOKENS + MATHQA_TOKENS),
        ),
    )


def _of_patches_and_clusters() -> tuple[Table, ...]:
    """Tables 5 and 6."""
    return (
        Table(
            name="mode/table05",
            title="side of the square patches that are switched off as a whole, on MBPP and HumanEval",
            columns=dict.fromkeys(CODE_COLUMNS, UNIT),
            rows=(
                _base("mode/table05-patch-01", *CODE_COLUMNS),
                *(
                    Row(
                        f"{side} x {side}",
                        dict(zip(CODE_COLUMNS, own, strict=True)),
                        f"mode/table05-patch-{side:>02}",
                        pick="expert",
                    )
                    for side, own in paper.PATCHES.items()
                ),
            ),
            way=BUILDS,
            protocol=SAMPLES + "; both under the band that pass@1 chose",
            approximated=BUNDLED,
            needs=Needs(LLAMA, SEVEN_B, CODE_TOKENS, CODE),
        ),
        Table(
            name="mode/table06",
            title="number of clusters that a domain is divided into, on MMLU, experts picked by the router",
            columns={"mmlu": UNIT},
            rows=tuple(
                Row(f"{k} clusters", {"mmlu": score}, f"mode/table06-k-{k:>02}", pick="routed")
                for k, score in paper.COUNTS.items()
            ),
            way=BUILDS,
            protocol="theirs: bands chosen on the test split; ours: chosen on the reference split, the router too",
            approximated=BUNDLED,
            needs=Needs(LLAMA, SEVEN_B, MMLU_TOKENS),
        ),
    )


MODE_TABLES: tuple[Table, ...] = (
    Table(
        name="mode/table01",
        title="five models on five benchmarks: baseline, experts with known subdomains (DENoise), routed mixture (MoDE)",
        columns=dict.fromkeys(paper.COLUMNS, UNIT),
        rows=main_rows("DENoise", "MoDE", {}),
        way=BUILDS,
        protocol=SAMPLES + "; both under the band that pass@1 chose",
        approximated={s: f"{said}; one model for all five" for s, said in BUNDLED.items()},
        needs=NEEDS_ALL,
    ),
    *_of_bands(),
    *_of_patches_and_clusters(),
    sweep(7, "mmlu", MMLU_TOKENS),
    sweep(8, "gsm8k", GSM8K_TOKENS),
    sweep(9, "mathqa", MATHQA_TOKENS),
    sweep(10, "humaneval", CODE_TOKENS / 2, "pass@"),
    sweep(11, "mbpp", CODE_TOKENS / 2, "pass@"),
)

WHOLE = {"bands.scope": "layer"}
"""Free-MoE ranks the weights of a whole matrix together."""

NOT_IN_FREE_MOE = {2: ("GSM8K", "inf"), 3: ("20 %",), 6: ("6 clusters", "8 clusters")}


def as_free_moe(table: Table) -> Table:
    """The same table in Free-MoE: one ranking spans a matrix, and some rows and columns are not there."""
    rows = tuple(
        replace(r, label=r.label.replace("DENoise", "DOWP").replace("MoDE", "Free-MoE"), changes={**r.changes, **WHOLE})
        for r in table.rows
    )
    number = int(table.name[-2:])
    kept: tuple[Row, ...] = tuple(
        r for r in rows if not any(word in r.label for word in NOT_IN_FREE_MOE.get(number, ()))
    )
    columns = {"mmlu": UNIT} if number == 2 else table.columns
    return replace(
        table,
        name=table.name.replace("mode/", "free-moe/"),
        title=table.title.replace("DENoise", "DOWP").replace("MoDE", "Free-MoE"),
        columns=columns,
        rows=kept,
        protocol=f"{table.protocol.partition('; the paper')[0]}; one ranking per matrix, as its text sorts",
    )
