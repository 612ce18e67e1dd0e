"""T19: clients at a server with four experts over real HTTP, against transformers' generate, one request after the other.

Where ``$FREEMOE_VLLM_PYTHON`` names a Python with vLLM, the same clients also ask vLLM, with four LoRA adapters on the same base.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch

from benchmarks.harness import Figure, Outcome, Settings, in_own_process
from benchmarks.serve.material import NAMES, Wish, generated, open_base, serving, wishes
from benchmarks.serve.vllm_lora import python_with_vllm, vllm_serving
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.serve.engine.runner import SlotRunner

CLIENTS = (1, 4, 16, 32)
FASTER, STEADY = 3.0, 2.0


def run(settings: Settings) -> Outcome:
    """Measure both sides in turns."""
    python = python_with_vllm()
    moe = open_base(settings)
    several = CLIENTS[:2] if settings.quick else CLIENTS
    each, tokens = (1, 4) if settings.quick else (4, 48)
    experts = ["base", *NAMES]
    details: dict[str, Any] = {"threads": torch.get_num_threads(), "clients": {}, "batch_invariant": {}, "vllm": {}}
    rounds: dict[int, list[dict[str, Any]]] = {clients: [] for clients in several}
    rivals, apart = copy.deepcopy(rounds), copy.deepcopy(rounds)
    singly: list[float] = []
    with contextlib.ExitStack() as stack, settings.progress.stage("serve", settings.rounds) as advance:
        url, engine = stack.enter_context(serving(moe, max(several)))
        invariant, _ = stack.enter_context(serving(moe, max(several), batch_invariant=True))
        other = stack.enter_context(vllm_serving(python, moe, max(several), engine.limits.context)) if python else None
        details["runner"] = type(engine.runner).__name__
        details["cache_bytes"] = 0
        for number in range(settings.rounds):
            singly.append(one_at_a_time(moe, wishes(moe, 4 * each, tokens, experts, settings.seed + number)))
            for clients in several:
                asked = [astuple(w) for w in wishes(moe, clients * each, tokens, experts, settings.seed + number)]
                rounds[clients].append(in_own_process("benchmarks.serve.load", [url, clients, asked]))
                apart[clients].append(in_own_process("benchmarks.serve.load", [invariant, clients, asked]))
                if other is not None:
                    rivals[clients].append(in_own_process("benchmarks.serve.load", [other, clients, asked]))
            advance(1)
        if isinstance(engine.runner, SlotRunner):
            details["cache_bytes"] = engine.runner.cache.num_bytes
    details["one_at_a_time_tokens_per_second"] = [round(speed, 2) for speed in singly]
    figures = [_speed(clients, rounds[clients], singly) for clients in several]
    for clients in several:
        figures += _times(clients, rounds[clients])
        details["clients"][clients] = [_summed(found) for found in rounds[clients]]
        title = f"tokens/s of {clients} client{'s' if clients > 1 else ''}, --batch-invariant over the default"
        speeds = zip(apart[clients], rounds[clients], strict=True)
        share = statistics.median(a["tokens"] / a["seconds"] / (b["tokens"] / b["seconds"]) for a, b in speeds)
        figures.append(Figure(title, share))
        details["batch_invariant"][clients] = [_summed(found) for found in apart[clients]]
        if other is not None:
            figures.append(_against(clients, rounds[clients], rivals[clients]))
            details["vllm"][clients] = [_summed(found) for found in rivals[clients]]
    return Outcome(tuple(figures), details)


def one_at_a_time(moe: FreeMoE, asked: Sequence[Wish]) -> float:
    """Tokens per second of transformers' generate, one request after the other, each under its expert."""
    generated(moe, asked[0])  # warms up
    began = time.perf_counter()
    written = sum(len(generated(moe, wish)) for wish in asked)
    return written / (time.perf_counter() - began)


def _speed(clients: int, found: list[dict[str, Any]], singly: list[float]) -> Figure:
    speeds = [one["tokens"] / one["seconds"] for one in found]
    over = statistics.median(a / b for a, b in zip(speeds, singly, strict=True))
    note = f"{statistics.median(speeds):.0f} tokens/s over HTTP, {statistics.median(singly):.0f} by generate"
    name = f"tokens/s of {clients} client{'s' if clients > 1 else ''}, over one request at a time"
    return Figure(name, over, FASTER if clients == 16 else None, note=note)


def _against(clients: int, found: list[dict[str, Any]], rival: list[dict[str, Any]]) -> Figure:
    ours, theirs = ([one["tokens"] / one["seconds"] for one in side] for side in (found, rival))
    first, between = (percentile(sorted(v for one in rival for v in one[kind]), 0.5) for kind in ("first", "between"))
    over = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    note = (
        f"{statistics.median(theirs):.0f} tokens/s by vLLM, first token p50 {1000 * first:.1f} ms, between tokens p50 "
        f"{1000 * between:.1f} ms"
    )
    return Figure(f"tokens/s of {clients} client{'s' if clients > 1 else ''}, over vLLM with LoRA", over, note=note)


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values; NaN of none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def _times(clients: int, found: list[dict[str, Any]]) -> list[Figure]:
    figures = []
    for kind, name in (("first", "first token"), ("between", "between tokens")):
        values = sorted(value for one in found for value in one[kind])
        half, most = (percentile(values, share) for share in (0.5, 0.95))
        told = f"p50 {1000 * half:.1f} ms, p95 {1000 * most:.1f} ms"
        if kind == "first" and clients == 4:
            label = f"{name} at {clients} clients, p95 over p50"
            figures.append(Figure(label, most / half, STEADY, "lower", note=told))
        else:
            label = f"{name} at {clients} client{'s' if clients > 1 else ''}, p95"
            figures.append(Figure(label, 1000 * most, None, "lower", " ms", 1, told))
    return figures


def _summed(found: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": found["tokens"], "seconds": round(found["seconds"], 3)} | {
        f"{kind}_p{share}": round(percentile(found[kind], share / 100), 5)
        for kind in ("first", "between")
        for share in (50, 95)
    }
