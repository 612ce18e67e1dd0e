"""A made-up result with the schema that a build writes, so that no test here needs a build."""

import json
import math
import random

from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.results import EvaluationResult
from freemoe.results.scores import ScoreRow
from freemoe.systems import SYSTEMS

ROWS = ("base", "expert", "routed", "control", "oracle")
BANDS = {f"wanda p=2 {10 * i}-{10 * i + 10} %": ["wanda", i / 10, (i + 1) / 10] for i in range(10)}
GAINS = {"base": 0.0, "expert": 12.0, "routed": 9.5, "control": -0.4, "oracle": 14.0}


def _row(rng, name, base, documents, text, changed):
    gain = GAINS[name] * (0.7 + 0.6 * rng.random()) if changed or name == "oracle" else 0.0
    half = abs(gain) * 0.3
    if text:
        ratio = math.exp(-gain / 20)
        spread = math.exp(half / 20)
        return {
            "score": base * ratio,
            "gain": {"mean": gain / 20, "low": (gain - half) / 20, "high": (gain + half) / 20},
            "ratio": {"mean": ratio, "low": ratio / spread, "high": ratio * spread},
            "documents": documents,
        }
    won = round(abs(gain) * documents / 100)
    row = {
        "score": base + gain,
        "gain": {"mean": gain, "low": gain - half, "high": gain + half},
        "documents": documents,
    }
    # A control is a mean of several runs, so nothing is won or lost.
    return row if name == "control" else row | {"won": won + 10, "lost": 10 if gain else 0, "mcnemar_p": 0.003}


def _subdomain(rng, name, chosen, rows, text, bands, base):
    changed = chosen != "base"
    candidates = {"saliency": base * 0.6 if text else base + (13 if changed else -1)} if "oracle" in rows else {}
    if "oracle" in rows:
        candidates |= {c: base * (3 - 0.2 * i) if text else base - 8 + i for i, c in enumerate(bands)}
    return {
        "name": name,
        "reference_documents": 40,
        "chosen": chosen,
        "verdict": f"{chosen} accepted (0.12)" if changed else "no reliable gain (saliency: +0.40 points, Holm p = 0.8)",
        "verdicts": [
            {"metric": "saliency", "candidate": "saliency", "gain": 0.12, "p": 0.001, "tested": 12, "holm": 0.004},
            *([{"metric": "wanda", "candidate": next(iter(bands)), "gain": -0.01, "p": 0.7, "tested": 40, "holm": 1.0}]
              if bands else []),
        ],
        "off": 210 if changed else 0,
        "off_share": 0.0021 if changed else 0.0,
        "where_off": [
            {"layer": layer, "sublayer": sub, "off": rng.randrange(1, 60), "of": 10000}
            for layer in range(5)
            for sub in ("attention", "mlp")
        ],
        "where_off_is": "chosen" if changed else "best candidate, turned down: saliency",
        "purification_curve": [2.5, 2.1, 1.9 - 0.2 * rng.random(), 2.0, 2.2],
        "forecast": {"first_order": 0.75, "disturbance": 0.25, "measured": 0.125} if changed else None,
        "units": _units(base, text) if name.endswith("s0") else None,
        "bands": bands,
        "rows": {n: _row(rng, n, base, 30, text, changed) for n in rows},
        "candidates": candidates,
    }  # fmt: skip


def _units(base, text):
    """The curve of an expert of whole units, beside two rivals."""

    def row(mean):
        seen = {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}
        return {"score": base, "gain": seen, **({"ratio": seen} if text else {})}

    points = [
        {
            "asked": share,
            "share": share,
            "units": round(100 * share),
            "candidate": share == 0.2,
            "row": row(mean),
            "rivals": {"wanda": row(mean + 0.2), "random": row(mean + 0.4)},
        }
        for share, mean in ((0.1, 0.9), (0.2, 0.8), (0.3, 1.2))
    ]
    cut = {"parameters": [100, 80], "prefill": [10.0, 15.0], "decode": [10.0, 12.0]}
    return {
        "kind": "neuron",
        "of": 100,
        "points": points,
        "largest_share": 0.2,
        "margin": 1.0,
        "guard_documents": 90,
        "cut": cut,
    }


def make_domain(name, chosen, *, text=False, rows=ROWS, bands=None, seed=0):
    """One domain with a subdomain per entry of ``chosen``."""
    rng = random.Random(f"{name}/{seed}")
    bands = BANDS if bands is None else bands
    base = 90.0 if text else 41.5
    subdomains = [_subdomain(rng, f"{name}/s{i}", c, rows, text, bands, base + 3 * i) for i, c in enumerate(chosen)]
    documents = []
    for i, sub in enumerate(subdomains):
        for k in range(30):
            saw = sub["name"] if k % 6 else subdomains[(i + 1) % len(subdomains)]["name"]
            sure = round(0.3 + 0.7 * rng.random(), 4)
            documents.append(
                {
                    "id": f"{name}/{i}-{k}",
                    "key": f"{name}{i}{k}",
                    "subdomain": sub["name"],
                    "routed_to": saw if sure >= 0.5 else "base",
                    "router_saw": saw,
                    "confidence": sure,
                    **dict.fromkeys(rows, -4.2 if text else float(k % 2)),
                }
            )
    return {
        "name": name,
        "metric": "perplexity" if text else "acc",
        "unit": "perplexity" if text else "points",
        "notes": [f"{name}: reference carved from train, 40 % of the documents"],
        "by": "field",
        "reference_documents": 40 * len(chosen),
        "reported_documents": 30 * len(chosen),
        "rows": {n: _row(rng, n, base, 30 * len(chosen), text, any(c != "base" for c in chosen)) for n in rows},
        "router": {
            "domain_accuracy": 0.97,
            "subdomain_accuracy": 0.9,
            "abstained": 0.06,
            "domain_ece": 0.012,
            "subdomain_ece": 0.045,
        },
        "subdomains": subdomains,
        "documents": documents,
    }


def typed(result):
    """A result as its reader gives it."""
    kind = EvaluationResult if result["kind"] == "evaluation" else SYSTEMS.get(result["kind"]).result_type
    return kind.model_validate_json(json.dumps(result))


def typed_row(gain=(0.0, None, None), ratio=None):
    """A row whose intervals are so: mean, low, high."""
    ends = {"gain": gain, **({"ratio": ratio} if ratio else {})}
    intervals = {name: dict(zip(("mean", "low", "high"), seen, strict=True)) for name, seen in ends.items()}
    return ScoreRow.model_validate({"score": 3.0, "documents": 9, **intervals})


def make_result(domains=None, threshold=0.5):
    """A result of two task domains and a text domain, unless other domains are given."""
    if domains is None:
        domains = [
            make_domain("math", ("saliency", "wanda p=2 0-10 %", "base")),
            make_domain("code", ("base", "saliency")),
            make_domain("wiki", ("saliency", "saliency"), text=True),
        ]
    recipe = BuildRecipe(model="some/base", domains={"math": ("m.jsonl",)}, output="experts")
    return {
        "format": 1,
        "kind": "domain-experts",
        "freemoe": "0.1.0",
        "created": "2030-01-02T03:04:05+00:00",
        "recipe": recipe.model_dump(mode="json"),
        "base": {
            "name": "some/base",
            "revision": None,
            "origin": None,
            "fingerprint": "ab12" * 16,
            "model_type": "llama",
            "dtype": "float32",
            "parameters": 260032,
            "weights": 226560,
            "layers": 5,
        },
        "domains": domains,
        "overall": {},
        "router": {
            "documents": 280,
            "domain_accuracy": 0.975,
            "subdomain_accuracy": 0.91,
            "domain_ece": 0.0123,
            "subdomain_ece": 0.0456,
            "without_temperature": {"domain_ece": 0.0789, "subdomain_ece": 0.1234},
            "threshold": threshold,
            "abstained": 0.0625,
            "measured": "5-fold, on reference documents that the routing model did not see",
            "p50_ms": 0.0652,
            "p95_ms": 0.0934,
        },
        "seen": {
            "file": "seen.safetensors",
            "documents": 280,
            "hashes": {"keys": 280, "questions": 280, "runs": 0},
            "share_of_runs": 1.0,
            "bytes": 4519,
        },
        "environment": {
            "python": "3.11.7",
            "platform": "Linux x86_64",
            "cpu": "some cpu",
            "cores": 2,
            "packages": {"freemoe": "0.1.0", "torch": "2.13.0"},
        },
        "cost": {
            "wall_seconds": 33.4,
            "peak_memory_bytes": 845307904,
            "units_done": 20,
            "units_reused": 3,
            "artefact_bytes": 8187,
        },
    }
