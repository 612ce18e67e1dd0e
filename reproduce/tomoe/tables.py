"""ToMoE's tables: the paper's numbers, and the conversions that measure ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reproduce.table import Needs, Row, Table
from reproduce.tomoe import numbers
from reproduce.tomoe.figures import FIGURES
from reproduce.tomoe.needs import (
    LLAMA_2_7B,
    LLAMA_2_13B,
    LLAMA_3_8B,
    PHI_2,
    SAME_DOCUMENTS,
    STANDS_IN,
)
from reproduce.tomoe.work import DENSE, OURS, way

RIVAL = "a method that is not here; the paper's number alone"
NEVER_TRAINED = ("static-magnitude", "static-activation", "activation-split")
"""Rivals that every conversion measures beside itself: nothing is trained, and the text and share are the same."""

# Model and active share -> recipe; what stands for a share that has no file of its own; N where a label names it.
RECIPES = {
    "Llama-2-7B": {70: "table01-llama-2-7b-70", 60: "table01-llama-2-7b-60", 50: "table01-llama-2-7b-50"},
    "Llama-2-13B": {70: "table01-llama-2-13b-70", 60: "table01-llama-2-13b-60", 50: "table01-llama-2-13b-50"},
    "Llama-3-8B": {70: "table03-llama-3-8b-70", 60: "table03-llama-3-8b-60", 50: "table03-llama-3-8b-50"},
    "Qwen2.5-14B": {50: "table09-qwen2.5-14b-50", 40: "table09-qwen2.5-14b-40"},
    "Phi-2": {70: "table02-phi-2-70"},
    "Qwen2.5-7B": {50: "experts-8-qwen2.5-7b-50", 40: "experts-8-qwen2.5-7b-40"},
}


def recipe_of(model: str, share: int, method: str) -> tuple[str, dict[str, Any]]:
    """The recipe of a conversion, and what it changes in it; of a dense model one that it stands beside."""
    own = RECIPES[model]
    if "N=" in method:
        return f"tomoe/experts-{method.partition('N=')[2]}-qwen2.5-7b-{share}", {}
    if share in own:
        return f"tomoe/{own[share]}", {}
    least = min(own)
    return f"tomoe/{own[least]}", {} if method == "Dense" else {"active": share / 100}


def rows_of(table: Mapping[str, Sequence[numbers.Line]], columns: Sequence[str]) -> tuple[Row, ...]:
    """A table of methods: ours where the method is dense or ToMoE's, the paper's number alone elsewhere."""
    rows = []
    for model, lines in table.items():
        for share, method, values in lines:
            label, paper = f"{model}, {share} %: {method}", dict(zip(columns, values, strict=True))
            if method == "Dense" or method.startswith("ToMoE"):
                recipe, changes = recipe_of(model, share, method)
                rows.append(Row(label, paper, recipe, changes, pick=DENSE if method == "Dense" else OURS))
            else:
                rows.append(Row(label, paper, absent=RIVAL))
    return tuple(rows)


def _perplexities() -> tuple[Row, ...]:
    rows = []
    for number, model in enumerate(("Llama-2-7B", "Llama-2-13B")):
        dense = {"perplexity": numbers.DENSE_PERPLEXITY[number]}
        rows.append(Row(f"{model}: Dense", dense, f"tomoe/{RECIPES[model][50]}", pick=DENSE))
        for place, share in enumerate((70, 60, 50)):
            recipe = f"tomoe/{RECIPES[model][share]}"
            for method, values in numbers.PERPLEXITY.items():
                label, paper = f"{model}, {share} %: {method}", {"perplexity": values[3 * number + place]}
                rows.append(
                    Row(label, paper, recipe, pick=OURS) if method == "ToMoE" else Row(label, paper, absent=RIVAL)
                )
            rows += [Row(f"{model}, {share} %: {rival} (ours)", {}, recipe, pick=rival) for rival in NEVER_TRAINED]
    return tuple(rows)


def _semi_structured() -> tuple[Row, ...]:
    """Table 2 is not in the text that we have: what its section says of it."""
    return (
        Row("Llama-2-7B: Dense", {"perplexity": 5.12}, "tomoe/table01-llama-2-7b-50", pick=DENSE),
        Row("Llama-2-7B, 50 %: SparseGPT 2:4, second best", {"perplexity": 10.17}, absent=RIVAL),
        Row("Llama-2-7B, 50 %: ToMoE", {"perplexity": 8.36}, "tomoe/table01-llama-2-7b-50", pick=OURS),
        Row("Llama-2-13B: Dense", {"perplexity": 4.57}, "tomoe/table01-llama-2-13b-50", pick=DENSE),
        Row("Llama-2-13B, 50 %: Pruner-Zero 2:4, second best", {"perplexity": 7.41}, absent=RIVAL),
        Row("Llama-2-13B, 50 %: ToMoE", {"perplexity": 6.78}, "tomoe/table01-llama-2-13b-50", pick=OURS),
    )


def _ablations() -> tuple[Row, ...]:
    return tuple(
        Row(label, dict(zip(numbers.ZERO_SHOT, values, strict=True)), f"tomoe/{recipe}", pick=OURS)
        for label, (recipe, values) in numbers.TABLE13.items()
    )


def _speeds() -> tuple[Row, ...]:
    rows = []
    for number, batch in enumerate((512, 1024, 1536)):
        for method, values in numbers.TABLE15.items():
            label = f"batch {batch}: {method}"
            paper = {"tokens/s": values[number], "over dense": values[number] / numbers.TABLE15["Llama-2-7B"][number]}
            if method.startswith("LLaMA-MoE"):
                rows.append(Row(label, paper, absent=RIVAL))
            else:
                pick = f"{number}:{OURS if method == 'ToMoE' else DENSE}"
                rows.append(Row(label, paper, "tomoe/table01-llama-2-7b-50", pick=pick))
    return tuple(rows)


def _tokens(text: str, places: Mapping[str, str]) -> tuple[Row, ...]:
    recipe = "tomoe/table01-llama-2-7b-50"
    return tuple(Row(label, {}, recipe, pick=f"{text}:{place}") for label, place in places.items())


OF_TEXT = ("perplexity", "active")


def _of_tasks(
    name: str, title: str, rows: tuple[Row, ...], tasks: Sequence[str], needs: Needs, scale: str = "at_scale"
) -> Table:
    """A table of zero-shot or few-shot tasks."""
    here = [c for c in tasks if c in ("ARC-e", "ARC-c", "HellaS.", "MMLU", "Average")]
    return Table(
        name=f"tomoe/{name}",
        title=title,
        columns={**dict.fromkeys(tasks, " %"), "perplexity": "", "active": " %"},
        rows=rows,
        way=way("text_and_tasks", scale),
        protocol=SAME_DOCUMENTS,
        columns_at={"tiny": ("Average", *OF_TEXT), "small": (*here, *OF_TEXT)},
        approximated=STANDS_IN,
        needs=needs,
    )


def _of_tokens(name: str, title: str, text: str, places: Mapping[str, str]) -> Table:
    return Table(
        name=f"tomoe/{name}",
        title=title,
        columns={"experts": "", "same as before": " %", "by chance": " %", "most used": " %"},
        rows=_tokens(text, places),
        way=way("tokens"),
        protocol="theirs: a text coloured by expert; ours: a text of our own, and how often a token goes to the expert of the "
        "one before it, beside what the experts' shares give by chance (freemoe.tomoe.usage.token_experts has every token)",
        approximated=STANDS_IN,
        needs=LLAMA_2_7B,
    )


def _of_text(name: str, title: str, rows: tuple[Row, ...]) -> Table:
    return Table(
        name=f"tomoe/{name}",
        title=title,
        columns={"perplexity": "", "active": " %"},
        rows=rows,
        way=way("text_and_tasks"),
        protocol="theirs: WikiText-2's test part, at what looks like 4,096 tokens (dense 5.12); ours: the test part of the text that "
        "trained, in blocks of train.block tokens, every model on the same blocks; intervals are over blocks",
        approximated=STANDS_IN,
        needs=LLAMA_2_13B,
    )


LAST, THREE = {"last layer": "1"}, {"first layer": "0", "middle layer": "0.5", "last layer": "1"}

TABLES: tuple[Table, ...] = (
    _of_text("table01", "perplexity beside structured pruning, Llama-2-7B and 13B", _perplexities()),
    _of_text("table02", "perplexity beside semi-structured pruning (what the section says of it)", _semi_structured()),
    _of_tasks(
        "table03", "zero-shot tasks: Llama-2-7B, Llama-3-8B, Qwen2.5-7B", rows_of(numbers.TABLE03, numbers.ZERO_SHOT),
        numbers.ZERO_SHOT, LLAMA_3_8B,
    ),
    _of_tasks(
        "table04", "zero-shot tasks beside other ways to build mixtures", rows_of(numbers.TABLE04, numbers.ZERO_SHOT),
        numbers.ZERO_SHOT, LLAMA_2_7B,
    ),
    _of_tasks(
        "table05", "few-shot tasks beside LLaMA-MoE and CMoE, Llama-2-7B",
        rows_of(numbers.TABLE05, numbers.TABLE05_COLUMNS), numbers.TABLE05_COLUMNS, LLAMA_2_7B, "few_shot",
    ),
    _of_tasks(
        "table06", "few-shot tasks beside LLaMA-MoE-v2, Llama-3-8B",
        rows_of(numbers.TABLE06, numbers.TABLE06_COLUMNS), numbers.TABLE06_COLUMNS, LLAMA_3_8B, "few_shot_and_truth",
    ),
    _of_tokens("table07", "which expert a text's tokens go to in the last layer", "prose", LAST),
    Table(
        name="tomoe/table08",
        title="what is trained, and what of it a converted model keeps",
        columns={"added": " M", "share": " %"},
        rows=(Row("kept, N = 8", {"added": 18.4, "share": 0.27}, "tomoe/table01-llama-2-7b-50"),),
        way=way("added"),
        protocol="theirs: counted by formula for Llama-2-7B (App. A.1); ours: counted on the converted model, routers and "
        "value gates with their norms and biases",
        approximated=STANDS_IN,
        needs=LLAMA_2_7B,
    ),
    _of_tasks(
        "table09", "zero-shot tasks: Llama-2-13B, Qwen2.5-14B", rows_of(numbers.TABLE09, numbers.ZERO_SHOT),
        numbers.ZERO_SHOT, LLAMA_2_13B,
    ),
    _of_tasks(
        "table10", "zero-shot tasks: Phi-2", rows_of(numbers.TABLE10, numbers.ZERO_SHOT), numbers.ZERO_SHOT, PHI_2
    ),
    _of_tokens("table11", "which expert a text's tokens go to in three layers", "prose", THREE),
    _of_tasks(
        "table12", "zero-shot tasks: Llama-2-7B, more settings", rows_of(numbers.TABLE12, numbers.ZERO_SHOT),
        numbers.ZERO_SHOT, LLAMA_2_7B,
    ),
    _of_tasks(
        "table13", "what each part of the method is worth, Llama-2-7B at 50 %", _ablations(), numbers.ZERO_SHOT, LLAMA_2_7B
    ),
    _of_tokens("table14", "which expert the tokens of a mathematical text go to", "mathematics", THREE),
    Table(
        name="tomoe/table15",
        title="tokens per second at three batch sizes",
        columns={"tokens/s": "", "over dense": "x"},
        rows=_speeds(),
        way=way("speed", "for_speed"),
        protocol="theirs: unknown lengths; ours: a prompt of 64 tokens in every row, both models in turns in one process, median "
        "of three rounds; python -m benchmarks tomoe-speed measures a large shape and decoding",
        approximated=STANDS_IN | {"tiny": f"{STANDS_IN['tiny']}; batches of 4, 8 and 12"},
        needs=LLAMA_2_7B,
    ),
    *FIGURES,
)  # fmt: skip
