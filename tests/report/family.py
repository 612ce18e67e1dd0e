"""Small made-up results of the four commands that write a page, and their pages."""

import copy
import random

from freemoe.domain_experts import report as experts
from freemoe.hookmoe import report as trimmed
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.recipes import EvalRecipe
from freemoe.report import evaluation
from freemoe.tomoe import report as conversion
from freemoe.tomoe.recipe import ConvertRecipe
from tests.report.synthetic import make_result, typed

LAYERS = 4


def _common(recipe, kind):
    build = make_result()
    shared = {
        name: copy.deepcopy(build[name]) for name in ("format", "freemoe", "created", "seen", "environment", "cost")
    }
    del shared["cost"]["artefact_bytes"]
    return {**shared, "kind": kind, "recipe": recipe.model_dump(mode="json")}


def make_conversion():
    """A conversion of four layers with three rivals."""
    rng = random.Random(3)
    blocks = [2.0 + rng.random() for _ in range(24)]

    def score(more):
        nll = [100 * (v + more + 0.02 * rng.random()) for v in blocks]
        return {
            "perplexity@128": 2.718281828 ** (sum(nll) / 2400),
            "next_token_accuracy@128": 0.4 - 0.1 * more,
            "length": 128,
            "nll": nll,
            "right": [40] * 24,
            "tokens": [100] * 24,
        }

    rivals = {"static-magnitude": 1.4, "static-activation": 0.9, "activation-split": 0.7}
    return {
        **_common(ConvertRecipe(model="some/base", text=("t.txt",), output="converted"), "converted"),
        "base": {"name": "some/base", "fingerprint": "cd34" * 16, "model_type": "llama"},
        "blocks": {"length": 128, "train": 58000, "held_out": 6400, "test": 2400},
        "parameters": {"active_share": 0.5, "active_share_at_run_time": 0.62, "active_share_with_embeddings": 0.55},
        "layers": [
            {"query_dims": 20 - n, "value_dims": 16, "head_dim": 24, "widths": [60 + n] * 8, "union": 100, "width": 120}
            for n in range(LAYERS)
        ],
        "usage": [[(1 + (e + n) % 5) / 24 for e in range(8)] for n in range(LAYERS)],
        "scores": {"dense": score(0.0), "converted": score(0.4), **{n: score(v) for n, v in rivals.items()}},
        "speed": {"prompt": 64, **{side: {"ttft": 0.007, "itl": 0.003} for side in ("dense", "converted")}},
        "rivals": {name: {"attention": 0.5, "active": 0.5} for name in rivals},
        "history": {
            "columns": ["distillation", "active", "target"],
            "rows": [[2.0 / (1 + n), 1 - 0.05 * n, 0.5] for n in range(10)],
        },
        "held_out_curve": [],
    }


def make_trim(won=(0.6, 0.55, 0.66)):
    """A trim of a mixture of four layers; the shares of the loss that hooks won back, or no hooks."""

    def row(ce, kl, share=None):
        per_layer = {key: {str(n): v + 0.02 * n for n in range(LAYERS)} for key, v in _PER_LAYER.items()}
        return {
            "ce": ce,
            "kl": kl,
            **per_layer,
            **({"recovered_ce": list(share), "recovered_kl": list(share)} if share else {}),
        }

    points = [
        {"act": 1 + 0.25 * n, "drop": 0.15 / (1 + n), "source": ("knapsack", "tlnle")[n % 2], "plan": "1,1,1,1", "k": 1}
        for n in range(5)
    ]
    free = {"rescaled" if won else "scale and bias": row(0.96, 0.14, (0.25, 0.2, 0.3))}
    hooks = {"hooks": row(0.9, 0.09, won), "control": row(0.83, 0.002, (0.03, 0.02, 0.05))} if won else {}
    return {
        **_common(TrimRecipe(model="some/mixture", text="t.txt", output="trimmed"), "trimmed-moe"),
        "base": {"name": "some/mixture", "fingerprint": "ef56" * 16, "family": "mixtral", "plan": "2,2,2,2", "act": 2.0,
                 "experts": [8] * LAYERS},
        "plan": {"text": "1,1,1,1", "act": 1.0, "score": "kl", "points": points, "pareto": points[::2], "chosen": points[0],
                 "profile": [{"layer": n, "k": 1, "drop": 0.1 - 0.02 * n} for n in range(LAYERS)]},
        "rescale": {"rule": "kept_mass", "held_out_kl": {}},
        "hooks": {"widths": {}, "residual_kl": {}, "losses": {"hooks": [0.11, 0.09], "control": [0.86, 0.85]} if won else {}},
        "cost_of_a_token": {
            "full": {"total": 900960, "active": 348000, "hooks": 0},
            "trimmed": {"total": 908644, "active": 263524, "hooks": 7684},
        },
        "test": {
            "tokens": 7748,
            "rows": {"full": row(0.84, 0.0), "plan": row(1.0, 0.19), **free, **hooks},
        },
        "speed": {"prompt": 64, **{side: {"ttft": 0.007, "itl": 0.003} for side in ("full", "trimmed")}},
        "text": {"passages": [12937, 1504, 1559], "blocks": [512, 64, 128]},
    }  # fmt: skip


_PER_LAYER = {"act": 1.0, "load_cv": 0.4, "route_agreement": 0.9}


def make_evaluation():
    """An evaluation of three rows on a task and on a text."""
    build = make_result()
    names = {"base": "base", "auto": "routed", "math/s0": "expert"}
    recipe = EvalRecipe(artefact="experts", domains={"math": ("m.jsonl",)}, experts=tuple(names))
    return {
        "format": 1,
        "kind": "evaluation",
        "freemoe": "0.1.0",
        "created": "2030-01-02T03:04:05+00:00",
        "recipe": {**recipe.model_dump(mode="json"), "seed": 0},
        "seen": {"known": True, "seed": 0, **build["seen"]},
        "domains": [
            {
                "name": domain["name"],
                "notes": domain["notes"],
                "set_aside": {"documents": 3, "of": 93, "by": {"key": 3}},
                "unit": domain["unit"],
                "rows": {shown: copy.deepcopy(domain["rows"][name]) for shown, name in names.items()},
                "documents": [{"id": "m/1", "key": "k", "base": 1.0}],
            }
            for domain in (build["domains"][0], build["domains"][2])
        ],
        "environment": copy.deepcopy(build["environment"]),
    }


def make_build():
    """A build whose subdomains say what they hold."""
    result = make_result()
    for domain in result["domains"]:
        for n, sub in enumerate(domain["subdomains"]):
            prompts = [f"{k}. What is {k} + {n}, and why? " + "Show your work. " * 4 for k in range(3)]
            sub["holds"] = {"prompts": [p[:99] + "…" for p in prompts], "words": ["what", "why", "work"]}
    return result


FAMILY = {
    "build": (make_build, lambda result: experts.page(typed(result))),
    "convert": (make_conversion, lambda result: conversion.page(typed(result))),
    "trim": (make_trim, lambda result: trimmed.page(typed(result))),
    "eval": (make_evaluation, lambda result: evaluation.page(typed(result))),
}
"""Command -> a result, and what makes its page."""
