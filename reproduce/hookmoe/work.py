"""How a row of HookMoE's tables is measured: a plan or a whole trim, on tasks and on text that chose nothing."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freemoe.assets import benchmark_path
from freemoe.core.errors import DataError
from freemoe.core.files import json_digest, write_atomic
from freemoe.core.run.progress import Progress
from freemoe.hookmoe.recipe import TrimRecipe
from reproduce.scoring import scored
from reproduce.table import Measured, Row, Scene

DOMAIN = "Math"
"""The column of the domain-specific task; the paper's is the mean of two."""

DOMAIN_TASKS = ("GSM8K", "Minerva")
IN_DATA = ("ARC-c", "ARC-e", "HellaSwag", "MMLU", "OBQA", "RTE")
"""Columns whose files are in the data folder of ``small``."""

PAPER_LAYERS, TINY_LAYERS = 32, 4
"""Of Mixtral-8x7B, and of the bundled mixture."""

GROUPS = 8
"""Groups of layers of the paper's sweep."""

TINY: Mapping[str, Any] = {"blocks": 48, "block": 128, "steps": 60, "documents": 60, "shorter": 16}
SMALL: Mapping[str, Any] = {"blocks": 256, "block": 256, "steps": 300, "documents": 200, "shorter": 4}
TINY_TASKS = {name: [f"demo:{name}"] for name in ("math", "code", "general")} | {DOMAIN: ["demo:math"]}
NO_MODEL = (
    "The scale small needs a mixture model: --model with its folder. `python -m benchmarks.hookmoe.mixtures FOLDER` trains two of "
    "25M parameters on real text; any mixture that freemoe trim takes will do."
)
NO_DATA = (
    "The scale small needs the real data: --data-root with the folder that holds wikitext-2-raw, arc and the others."
)


def at_scale(recipe: dict[str, Any], scene: Scene, tasks: dict[str, str]) -> dict[str, Any]:
    """A paper's trim cut down to a scale: other mixture and text, fewer and shorter blocks and steps, rate and units by default.

    Its tasks are beside it, as ``arguments``: at ``tiny`` the three bundled domains, else the paper's eight, and of mathematics.
    A row of more text or steps has as much more of both; the held-out and the test part stay.

    Raises:
        DataError: At ``small`` without a model or data.
    """
    data: dict[str, Any] = {} if scene.limit is None else {"limit": scene.limit}
    if scene.data_root is not None and scene.scale != "tiny":
        data["root"] = str(scene.data_root)
    if scene.scale == "paper":
        own = {} if "timing" in recipe else {name: [task] for name, task in tasks.items()}
        return {
            **recipe,
            "model": scene.model or recipe["model"],
            "arguments": {"tasks": own, "data": {**data, "fewshot_draw": "document"}},
        }
    of_math, given = recipe["text"].startswith("math"), recipe.get("training", {})
    if scene.scale == "tiny":
        sizes, model, own = TINY, scene.model or "freemoe-demo-moe", dict(TINY_TASKS)
        text = str(benchmark_path("math", "reference")) if of_math else "demo:"
    elif scene.model is None or scene.data_root is None:
        raise DataError(NO_MODEL if scene.model is None else NO_DATA)
    else:
        sizes, model = SMALL, scene.model
        own = {name: [tasks[name]] for name in IN_DATA} | {DOMAIN: ["mathqa"]}
        text = str(scene.data_root / ("gsm8k/train.jsonl" if of_math else "wikitext-2-raw/wiki.train.raw"))
    blocks = sizes["blocks"] if scene.limit is None else scene.limit
    steps = sizes["steps"] if scene.limit is None else 8
    training = {
        **given,
        "block": sizes["block"],
        "limit": max(2, int(blocks * given.get("limit", 512) / 512)),
        "held_out": max(4, blocks // 4),
        "test": max(8, blocks // 2),
        "steps": max(1, round(steps * given.get("steps", 1000) / 1000)),
        "every": max(1, steps // 4),
        "rate": None,
        "control": False,
        # The bundled documents are shorter than a block.
        **({"samples": "packed"} if scene.scale == "tiny" else {}),
    }
    plan = dict(recipe.get("plan", {}))
    if str(plan.get("given", "")).startswith("uniform:") and scene.scale == "tiny":
        plan["given"] = "uniform:1"  # the bundled mixture runs two
    if "timing" in recipe:
        prompts = [n // sizes["shorter"] for n in recipe["timing"]["prompts"]]
        recipe = {**recipe, "timing": {"prompts": prompts, "new_tokens": 17, "rounds": 5}}
        own = {}
    if scene.scale == "tiny" and "given" in plan:
        plan["given"] = _at_depth(plan["given"], TINY_LAYERS)
    arguments = {"tasks": own, "data": {"limit": sizes["documents"], **data}}
    cut = {"model": model, "text": text, "plan": plan, "training": training, "arguments": arguments}
    return {**recipe, **cut, "hooks": {**recipe.get("hooks", {}), "units": None}}


def _at_depth(plan: str, layers: int) -> str:
    """``tlnle:K,L`` with L as large a part of the depth as of the paper's mixture; other plans as they are."""
    if not plan.startswith("tlnle:"):
        return plan
    k, first = plan.removeprefix("tlnle:").split(",")
    return f"tlnle:{k},{max(1, round(int(first) * layers / PAPER_LAYERS))}"


def trim_record(
    recipe: TrimRecipe, folder: Path, progress: Progress, tasks: dict[str, list[str]], data: dict[str, Any]
) -> dict[str, Any]:
    """Trim, then score the full mixture, the plan alone and the artefact on tasks (name -> tasks).

    Returns:
        ``tasks``: name -> row -> score, gain; ``text``: row -> ce, kl, act and shares won back; ``cost``, ``speed``, ``losses``.
    """
    from freemoe.hookmoe.evaluation import eval_target
    from freemoe.hookmoe.pipeline import trim

    file = Path(recipe.output) / "result.json"
    if not file.is_file():
        trim(recipe, progress=progress)
    result = json.loads(file.read_text(encoding="utf-8"))
    return {
        "tasks": scored(recipe.output, eval_target, recipe, tasks, data, progress, (DOMAIN, *DOMAIN_TASKS)),
        "text": result["test"]["rows"],
        "cost": result["cost_of_a_token"],
        "act": {"full": result["base"]["act"], "plan": result["plan"]["act"]},
        "speed": result["speed"],
        "losses": result["hooks"]["losses"],
    }


def plans_record(
    recipe: TrimRecipe,
    folder: Path,
    progress: Progress,
    tasks: dict[str, list[str]],
    data: dict[str, Any],
    plans: dict[str, str],
) -> dict[str, Any]:
    """Score the full mixture and several plans, or rules that choose k per token, without hooks.

    ``plans``: name -> as ``freemoe trim --compare`` has it, or ``groups:A,B``: one expert fewer in the groups A to B of eight equal
    groups of layers. Those that are scored stay in ``folder`` until the record is written.

    Returns:
        Name -> ``tasks``: name -> row -> score and gain, for ``full`` and ``plan``; ``text``: their rows of `compare_plans`.
    """
    from freemoe.evals.evaluation import EvalTarget, make_variant
    from freemoe.hookmoe.material import prepare_trim
    from freemoe.hookmoe.plans.compare import apply_variant, compare_plans, read_variants

    model, tokenizer, text = prepare_trim(recipe)
    ways = {name: read_variants([_spelled(plan, model)], model)[0] for name, plan in plans.items()}
    found: dict[str, Any] = {}
    with progress.stage("plans", len(plans)) as advance:
        for name, way in ways.items():
            # Groups of few layers are the same plan.
            file = folder / f"{json_digest(way.name)}.json"
            if not file.is_file():
                full, own = compare_plans(model, text.test, [way.name], calibration=text.train)
                thresholds = {int(layer): value for layer, value in own.get("thresholds", {}).items()} or None
                rows = {
                    "full": make_variant(contextlib.nullcontext),
                    "plan": make_variant(functools.partial(apply_variant, model, way, thresholds)),
                }
                subject = EvalTarget(model, tokenizer, rows)
                on_tasks = scored(
                    recipe.model, lambda _, s=subject: s, recipe, tasks, data, progress, (DOMAIN, *DOMAIN_TASKS)
                )
                write_atomic(file, json.dumps({"text": {"full": full, "plan": own}, "tasks": on_tasks}).encode())
            found[name] = json.loads(file.read_text(encoding="utf-8"))
            advance(1)
    return found


def _spelled(plan: str, model: Any) -> str:
    """A plan as ``freemoe trim`` reads it; ``groups:A,B`` and ``tlnle:K,L`` by the layers of a model."""
    from freemoe.hookmoe.plans.layers import plan_of

    base = plan_of(model)
    layers, k = len(base.ks), max(k for k in base.ks if k is not None)
    if not plan.startswith("groups:"):
        return _at_depth(plan, layers)
    first, last = (int(g) for g in plan.removeprefix("groups:").split(","))
    return f"expert_n:{k},{first * layers // GROUPS},{-(-(last + 1) * layers // GROUPS) - 1}"


# ------------------------------------------------------------------------------------- reading


def scores(record: Mapping[str, Any], way: str) -> dict[str, Measured]:
    """Every task, and their average, of a row; the domain's tasks as one too."""
    tasks = record["tasks"]
    found = {name: Measured.of(rows[way], way == "full") for name, rows in tasks.items()}
    both = [tasks[name][way]["score"] for name in DOMAIN_TASKS if name in tasks]
    return found | ({DOMAIN: Measured(sum(both) / len(both))} if both else {})


def trimmed_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """``full``, ``plan`` or ``hooks``: parameters in millions, Act, tasks, loss and divergence on text."""
    cost, way = record["cost"], row.pick
    if way == "full":
        sizes = cost["full"]
    else:
        sizes = dict(cost["trimmed"])
        if way == "plan":
            sizes = {k: sizes[k] - sizes["hooks"] for k in ("active", "total")}
    found = {
        "active M": Measured(sizes["active"] / 1e6),
        "total M": Measured(sizes["total"] / 1e6),
        "Act": Measured(record["act"]["full" if way == "full" else "plan"]),
        "loss": Measured(record["text"][way]["ce"]),
        "KL": Measured(record["text"][way]["kl"]),
    }
    if way == "hooks" and (won := record["text"]["hooks"].get("recovered_kl")) and won[0] is not None:
        found["KL won back %"] = Measured(100 * won[0], None, *(None if v is None else 100 * v for v in won[1:]))
    return found | scores(record, way)


def training_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """The held-out loss of the hooks at a share of training, ``row.pick``."""
    losses = record["losses"].get("hooks", [])
    return {"loss": Measured(losses[round(float(row.pick) * (len(losses) - 1))])} if losses else {}


def speed_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """Times of the full and of the trimmed mixture at a prompt length, and their quotient, as this machine was loaded."""
    one = record["speed"]["lengths"][int(row.pick)]
    keys, ways = {"TTFT": "ttft", "ITL": "itl"}, ("full", "trimmed")
    times = {f"{name}, {way}": Measured(1e3 * one[way][key]) for name, key in keys.items() for way in ways}
    return {name: Measured(one["full"][key] / one["trimmed"][key]) for name, key in keys.items()} | times


def planned_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """A plan of the record, or ``full``: Act, every layer's experts, tasks, loss and divergence on text."""
    own = next(iter(record.values())) if row.pick == "full" else record[row.pick]
    way = "full" if row.pick == "full" else "plan"
    text = own["text"][way]
    found = {"loss": Measured(text["loss"]), "KL": Measured(text["kl"]), "Act": Measured(text["act"])}
    if way == "plan":
        found |= {f"layer {n}": Measured(act) for n, act in text["act_per_layer"].items()}
    return found | scores(own, way)
