"""What a row of a table shows of a conversion's record; ``Row.pick`` says which part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from reproduce.table import Measured, Row
from reproduce.tomoe.work import CONVERTED, DENSE

SORTED_EXPERTS = 8
"""Columns of the figure of expert usage."""


def step_rows(shares: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of eleven steps of the training at every active share."""
    return [
        {"label": f"{100 * share:.0f} %, step {10 * n}%", "changes": {"active": share}, "pick": str(n / 10)}
        for share in shares
        for n in range(11)
    ]


def depth_rows() -> list[dict[str, Any]]:
    """Rows of five shares of the depth."""
    return [{"label": f"depth {depth:.0%}", "pick": str(depth)} for depth in (0, 0.25, 0.5, 0.75, 1)]


def text_and_tasks(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """``dense``, ``converted`` or a rival: perplexity on the test part, tasks and the weights that a token uses."""
    text = record["text"][row.pick]
    found = {"own text": Measured(text["value"], None, text["low"], text["high"])}
    found["active"] = Measured(100 * record["active"][row.pick])
    if row.pick == CONVERTED:
        found["tokens M"] = Measured(record["trained"] / 1e6)
    for name, ways in record["tasks"].items():
        if row.pick in ways:
            own = ways[row.pick]
            text_task = own.get("unit") == "perplexity"
            found[name] = Measured(own["score"]) if text_task else Measured.of(own, row.pick == DENSE)
    return found


def added(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """What a converted model has beside the dense one's weights."""
    counted = record["parameters"]
    return {
        "added": Measured(counted["gates"] / 1e6),
        "share": Measured(100 * counted["gates"] / counted["total"]),
    }


def speed(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """``NUMBER:WAY``: tokens per second of the so-manyth batch, and over the dense model's."""
    number, _, way = row.pick.partition(":")
    both = list(record["speed"].values())[int(number)]
    batch = float(list(record["speed"])[int(number)])
    return {"batch": Measured(batch), "tokens/s": Measured(both[way]), "over dense": Measured(both[way] / both[DENSE])}


def _at(values: Sequence[Any], depth: str) -> Any:
    """The layer at a share of the depth."""
    return values[round(float(depth) * (len(values) - 1))]


def widths(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """A layer's shares of the dense one's dimensions and neurons."""
    layer = _at(record["layers"], row.pick)
    names = {"query_key": "Q, K", "value_output": "V, O", "mlp": "MLP", "union": "union of experts"}
    return {shown: Measured(100 * layer[name]) for name, shown in names.items()}


def boxes(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """Five numbers of a layer's experts' widths."""
    box = _at(record["boxes"], row.pick)
    return {n: Measured(100 * box[n] / box["dense"]) for n in ("least", "lower", "median", "upper", "most")}


def similarity(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """How much the experts of a layer share, pair by pair."""
    return {name: Measured(100 * value) for name, value in _at(record["similarity"], row.pick).items()}


def usage(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """A layer's experts, the most used first, and how even that is: entropy over its largest possible."""
    shares = sorted(_at(record["usage"], row.pick), reverse=True)
    even = -sum(s * math.log(s) for s in shares if s > 0) / math.log(len(shares))
    found = {f"{n + 1}.": Measured(100 * share) for n, share in enumerate(shares[:SORTED_EXPERTS])}
    return found | {"evenness": Measured(100 * even)}


def dynamics(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """The losses at a share of the training's steps."""
    found = record["dynamics"]
    names = {"distillation": "distillation", "size": "R_P", "union": "R_U", "balance": "R_L", "active": "active"}
    shown = {label: _at(found[name], row.pick) for name, label in names.items()}
    shown["active"] *= 100
    return {label: Measured(value) for label, value in shown.items()}


def tokens(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """``TEXT:PLACE``: of the first, middle or last layer, how its experts share a short text's tokens among them."""
    text, _, place = row.pick.partition(":")
    layers = record["tokens"]["layers"]
    column = round(float(place) * (len(layers) - 1))
    chosen = [token["experts"][column] for token in record["tokens"][text]]
    same = sum(a == b for a, b in itertools.pairwise(chosen)) / max(1, len(chosen) - 1)
    most = max(chosen.count(expert) for expert in set(chosen)) / len(chosen)
    # By chance two neighbours are as often alike as their experts' shares of the text say.
    chance = sum((chosen.count(expert) / len(chosen)) ** 2 for expert in set(chosen))
    return {
        "experts": Measured(len(set(chosen))),
        "same as before": Measured(100 * same),
        "by chance": Measured(100 * chance),
        "most used": Measured(100 * most),
    }
