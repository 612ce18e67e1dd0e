"""The runs that are killed: one of every system on a bundled tiny model, small, and with every kind of unit in it."""

import json

from freemoe.assets import BUNDLED, BUNDLED_MOE, DOMAINS, benchmark_path
from freemoe.domain_experts.pipeline import build
from freemoe.hookmoe.pipeline import trim
from freemoe.recipes import recipe_from
from freemoe.tomoe.pipeline import convert

OUTPUT = "out"
"""What every run writes, in a folder of its own: so the recipe, and all that tells of it, is the same everywhere."""

TEXT = "text.jsonl"

_BUILD = {
    "command": "build",
    "model": BUNDLED,
    "domains": {"code": ["demo:code"]},
    "data": {"limit": 16},
    "subdomains": {"by": "none"},
    "bands": {"step": 0.5, "ratio": 0.5},
    "search": {"metrics": ["saliency", "wanda"], "method": "exhaustive", "select": "argmax"},
    "evidence": {"controls": 1},
    "dtype": "float32",
}

RECIPES = {
    "build": {
        **_BUILD,
        "saliency": {
            "method": "both", "step": 0.002, "budget": 0.004, "patience": 1, "steps": 4, "every": 2, "step_tokens": 16,
        },
    },
    "build of units": {
        **_BUILD,
        "saliency": {"method": "greedy", "step": 0.002, "budget": 0.002, "patience": 1},
        "search": {"metrics": ["saliency"], "select": "argmax"},
        "units": {"unit": "neuron", "off": [0.1, 0.2], "steps": 2, "every": 1, "step_tokens": 16},
    },
    "convert": {
        "command": "convert",
        "model": BUNDLED,
        "text": [TEXT],
        "experts": 4,
        "active": 0.5,
        "train": {
            "steps": 6, "save_every": 3, "block": 64, "batch_tokens": 128, "statistics_tokens": 256, "evaluation_tokens": 256,
        },
        "dtype": "float32",
    },
    "trim": {
        "command": "trim",
        "model": BUNDLED_MOE,
        "text": TEXT,
        "plan": {"act": 1.0, "compare": ["uniform:1", "top_p:0.6"]},
        "training": {"steps": 4, "every": 2, "rows": 2, "block": 64, "limit": 8, "held_out": 4, "test": 4},
        "timing": {"new_tokens": 2, "rounds": 1},
        "dtype": "float32",
    },
}  # fmt: skip
"""Name -> recipe, without its output."""

OF_A_RUN = ("created", "environment", "cost", "speed")
"""Entries of ``result.json`` that are times, memory and counts of what was done: no two runs share them."""


def prepare(folder):
    """Write what the runs read into the folder that they run in."""
    folder.mkdir(parents=True)
    lines = []
    for domain in DOMAINS:
        rows = benchmark_path(domain, "reference").read_text(encoding="utf-8").splitlines()[:100]
        lines += [json.dumps({"text": " ".join(str(value) for value in json.loads(row).values())}) for row in rows]
    (folder / TEXT).write_text("\n".join(lines), encoding="utf-8")


def carry_out(name):
    """Do a run in the folder that this process is in."""
    recipe = recipe_from({**RECIPES[name], "output": OUTPUT, "device": "cpu", "threads": 1})
    runs = {"build": build, "convert": convert, "trim": trim}
    return runs[recipe.command](recipe)
