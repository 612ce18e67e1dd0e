"""ToMoE's figures: what they plot, as rows of numbers and as pictures of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reproduce.table import Needs, Row, Table
from reproduce.tomoe.needs import LLAMA_2_7B, LLAMA_3_8B, QWEN_7B, SAME_DOCUMENTS, SHOWN, STANDS_IN
from reproduce.tomoe.work import DENSE, OURS, way

DEPTHS = ("0", "0.25", "0.5", "0.75", "1")
STEPS = tuple(f"{n / 10:g}" for n in range(11))
PICTURES = "reproduce.tomoe.pictures"
QWEN, LLAMA_2, LLAMA_3 = "experts-8-qwen2.5-7b-50", "table01-llama-2-7b-50", "table03-llama-3-8b-50"
WIDTHS = {"Q, K": " %", "V, O": " %", "MLP": " %"}


def _layers(recipe: str, changes: Mapping[str, Any] | None = None) -> tuple[Row, ...]:
    return tuple(Row(f"depth {float(d):.0%}", {}, f"tomoe/{recipe}", changes or {}, pick=d) for d in DEPTHS)


def _by_layer(
    name: str, title: str, columns: Mapping[str, str], read: str, rows: tuple[Row, ...], needs: Needs, picture: str
) -> Table:
    return Table(
        name=f"tomoe/{name}",
        title=title,
        columns=columns,
        rows=rows,
        way=way(read),
        protocol=SHOWN,
        approximated=STANDS_IN,
        needs=needs,
        picture=f"{PICTURES}:{picture}",
    )


def _dynamics() -> Table:
    rows = tuple(
        Row(f"{share} %, step {float(step):.0%}", {}, f"tomoe/{QWEN}", {"active": share / 100}, pick=step)
        for share in (40, 50, 60, 70)
        for step in STEPS
    )
    return Table(
        name="tomoe/figure03",
        title="the losses in training, by active share",
        columns={"distillation": " nats", "R_P": "", "R_U": "", "R_L": "", "active": " %"},
        rows=rows,
        way=way("dynamics"),
        protocol="theirs: every mask begins at one, and R_P pushes it to the budget; ours below the paper's scale: every step keeps "
        "exactly the budget, so that R_P is zero throughout",
        approximated=STANDS_IN,
        needs=QWEN_7B,
        picture=f"{PICTURES}:dynamics",
        picture_alone=True,
    )


# What an ablation changes. Below the paper's scale R_U is off by default, so that it is asked for here.
ABLATED: dict[str, dict[str, Any]] = {
    "ToMoE": {"losses.union": 2.0},
    "language modelling instead of distillation": {"losses.union": 2.0, "train.loss": "lm"},
    "without R_U": {"losses.union": 0.0, "losses.union_attention": False},
    "one data set instead of three": {
        "losses.union": 2.0,
        "mix": None,
        "text": ["hf:Salesforce/wikitext:wikitext-103-raw-v1:train"],
    },
}


def _ablation() -> Table:
    rows = tuple(
        Row(f"{share} %: {label}", {}, f"tomoe/experts-8-qwen2.5-7b-{share}", changes, pick=OURS)
        for share in (40, 50)
        for label, changes in ABLATED.items()
    )
    return Table(
        name="tomoe/figure06c",
        title="what losses and data are worth, Qwen2.5-7B",
        columns={"Average": " %", "perplexity": "", "active": " %"},
        rows=rows,
        way=way("text_and_tasks"),
        protocol=f"{SAME_DOCUMENTS}; perplexity of a conversion of one data set is of that set",
        approximated=STANDS_IN,
        needs=QWEN_7B,
        picture=f"{PICTURES}:ablation",
    )


def _mmlu() -> Table:
    paper = {100: 67.22, 50: 36.31}
    recipes = {70: "table03-llama-3-8b-70", 60: "table03-llama-3-8b-60", 50: LLAMA_3}
    rows = tuple(
        Row(
            f"{share} %",
            {"MMLU": paper[share]} if share in paper else {},
            f"tomoe/{recipes.get(share, LLAMA_3)}",
            pick=DENSE if share == 100 else OURS,
        )
        for share in (100, 70, 60, 50)
    )
    return Table(
        name="tomoe/figure10",
        title="MMLU against active parameters, Llama-3-8B",
        columns={"MMLU": " %", "perplexity": "", "active": " %"},
        rows=rows,
        way=way("mmlu", "mmlu"),
        protocol=f"{SAME_DOCUMENTS}; of the paper's points only those that Table 6 prints are numbers",
        approximated=STANDS_IN | {"tiny": f"{STANDS_IN['tiny']}; its domain general for MMLU"},
        needs=LLAMA_3_8B,
        picture=f"{PICTURES}:accuracy",
    )


FIGURES: tuple[Table, ...] = (
    Table("tomoe/figure01", "dense, pruned, and a sub-network per token", absent="a drawing: nothing to run"),
    Table("tomoe/figure02", "the parts of the method", absent="a drawing: nothing to run"),
    _dynamics(),
    _by_layer(
        "figure04", "how a text's tokens fall to the experts, Llama-3-8B", {**{f"{n}.": " %" for n in range(1, 9)}, "evenness": " %"},
        "usage", _layers(LLAMA_3), LLAMA_3_8B, "usage",
    ),
    _by_layer("figure05", "widths of the layers, Qwen2.5-7B at 50 %", WIDTHS, "widths", _layers(QWEN), QWEN_7B, "widths"),
    _by_layer(
        "figure06a", "widths and union of the experts, Qwen2.5-7B at 50 %", {"MLP": " %", "union of experts": " %"}, "widths",
        _layers(QWEN), QWEN_7B, "widths",
    ),
    Table(
        "tomoe/figure06b", "cost in dollars beside DISP-LLM and LLM Surgeon",
        absent="prices of rented machines for methods that are not here; every conversion writes its own seconds",
    ),
    _ablation(),
    _by_layer("figure07", "widths of the layers, Llama-2-7B at 50 %", WIDTHS, "widths", _layers(LLAMA_2), LLAMA_2_7B, "widths"),
    _by_layer(
        "figure08", "widths of the experts before they are made equal, Llama-2-7B at 50 %",
        {"least": " %", "lower": " %", "median": " %", "upper": " %", "most": " %"}, "boxes",
        _layers(LLAMA_2, {"gates.equal_widths": False}), LLAMA_2_7B, "boxes",
    ),
    _by_layer(
        "figure09", "how alike the experts of a layer are: shared neurons over all of both, Llama-2-7B at 50 %",
        {"least": " %", "mean": " %", "most": " %"}, "similarity", _layers(LLAMA_2), LLAMA_2_7B, "widths",
    ),
    _mmlu(),
)  # fmt: skip
