"""What other engines can use of a plan: overrides where one k serves all layers, else the schedule and what it needs.

Hooks are not part of any of these: engines other than transformers need a change of their model class to run them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freemoe.core.files import write_atomic
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.models.spec import family_of


def engine_overrides(model: Any, k: int) -> dict[str, dict[str, Any]]:
    """Engine -> the setting that gives every layer k experts."""
    gate = family_of(model).gate
    assert gate is not None
    value = {gate.config_key: k}
    text = json.dumps(value, separators=(",", ":"))
    return {
        "transformers": {"from_pretrained": value},
        "vllm": {"hf_overrides": value, "flag": f"--hf-overrides '{text}'"},
        "sglang": {"flag": f"--json-model-override-args '{text}'"},
    }


def write_exports(folder: Path, model: Any, plan: LayerPlan, hooked: bool, rescale: str = "none") -> None:
    """Write ``plan.json``, and ``exports/ENGINE.json`` for a plan that is the same in every layer.

    ``hooked``: the artefact has hooks; engines know the model's own rule for router weights (``none``).
    """
    schedule = {
        "top_k": list(plan.ks),
        "act": plan.act,
        "layers_counted_from": 0,
        "apply": "set layer.mlp.gate.top_k (or the family's own path) to top_k[layer]; null is a dense layer",
        "hooks_included": hooked,
    }
    write_atomic(folder / "plan.json", (json.dumps(schedule, indent=1) + "\n").encode())
    k = plan.uniform_k
    if k is None:
        return
    (folder / "exports").mkdir(exist_ok=True)
    for engine, setting in engine_overrides(model, k).items():
        alone = "the plan alone, with the model's own rule for router weights"
        if hooked:
            alone += ": the hooks need a model class that runs them"
        note = alone if hooked or rescale != "none" else "the whole artefact"
        body = json.dumps({**setting, "covers": note}, indent=1) + "\n"
        write_atomic(folder / "exports" / f"{engine}.json", body.encode())
