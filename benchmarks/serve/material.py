"""A base with random experts, prompts for it, and a server on it in this process."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Settings
from freemoe.assets import BUNDLED
from freemoe.domain_experts.expert import DomainExpert, switch_expert
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.rank.random_mask import random_mask
from freemoe.evals.engine.tokens import context_length
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.mask import Mask
from freemoe.models.weights import find_weights
from freemoe.serve.catalogue import ServedExperts
from freemoe.serve.engine.engine import InferenceEngine
from freemoe.serve.http.app import make_app
from freemoe.serve.http.server import EngineServer
from freemoe.serve.metrics import ServerMetrics
from freemoe.serve.settings import EngineLimits

NAMES = ("one", "two", "three", "four")
OFF = 0.01
"""Share of the weights that an expert switches off."""


def random_experts(model: Any, names: Sequence[str], seed: int) -> list[DomainExpert]:
    """Experts that switch random single weights off."""
    weights = find_weights(model)
    first = Mask.of_indices({w.name: torch.arange(round(w.size * OFF)) for w in weights}, weights)
    return [switch_expert(name, random_mask(first, seed + i)) for i, name in enumerate(names)]


def open_base(settings: Settings) -> FreeMoE:
    """The base that is asked for, or the bundled one, with four experts; no token ends its answers."""
    model, tokenizer = load_base(settings.model or BUNDLED, None, "float32", "cpu")
    # Both sides write as many tokens as they are asked for.
    model.generation_config.eos_token_id = None
    return FreeMoE(model, random_experts(model, NAMES, settings.seed), None, tokenizer)


@dataclass(frozen=True)
class Wish:
    """One request: whose answer to which tokens, and how long at most."""

    expert: str
    prompt: tuple[int, ...]
    tokens: int


def wishes(moe: FreeMoE, count: int, tokens: int, experts: Sequence[str], seed: int) -> list[Wish]:
    """Requests with random prompts of 8 to 64 tokens."""
    rng = random.Random(seed)
    special = set(moe.tokenizer.all_special_ids)
    usual = [t for t in range(len(moe.tokenizer)) if t not in special]
    longest = min(64, context_length(moe.model, moe.tokenizer) - tokens)
    lengths = [rng.randint(min(8, longest), longest) for _ in range(count)]
    return [
        Wish(experts[i % len(experts)], tuple(rng.choice(usual) for _ in range(n)), tokens)
        for i, n in enumerate(lengths)
    ]


def generated(moe: FreeMoE, wish: Wish) -> list[int]:
    """The tokens of an answer, by transformers' generate alone."""
    ids = torch.tensor([wish.prompt])
    options = {"max_new_tokens": wish.tokens, "do_sample": False, "pad_token_id": moe.tokenizer.pad_token_id or 0}
    out = moe.generate(ids, attention_mask=torch.ones_like(ids), expert=wish.expert, **options)
    return out[0, ids.shape[1] :].tolist()


@contextlib.contextmanager
def serving(
    moe: FreeMoE, slots: int, roots: Sequence[Path] = (), batch_invariant: bool = False
) -> Iterator[tuple[str, InferenceEngine]]:
    """A server; its address, and its engine."""
    metrics = ServerMetrics()
    context = min(1024, context_length(moe.model, moe.tokenizer))
    engine = InferenceEngine(moe, EngineLimits(context, batch=slots, batch_invariant=batch_invariant), metrics).start()
    server = EngineServer(make_app(ServedExperts(engine), metrics, roots=roots), engine, "127.0.0.1", 0)
    with run_in_thread(server) as url:
        yield url, engine


@contextlib.contextmanager
def run_in_thread(server: EngineServer) -> Iterator[str]:
    """Run a server on a thread of its own inside a ``with`` block; yields the address."""
    thread = threading.Thread(target=server.run, name="freemoe server", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError(f"The server did not start on {server.config.host}:{server.config.port}.")
        time.sleep(0.01)
    try:
        yield f"http://{server.config.host}:{server.port}"
    finally:
        server.should_exit = True
        thread.join(30)
        server.engine.stop()
