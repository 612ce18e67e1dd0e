"""An exported folder against its dense one in a process in which freemoe cannot be imported.

What is measured is what somebody has who was given the folder alone: transformers, ``trust_remote_code``, and the code that
lies beside the weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Settings, one_clock
from freemoe.core.errors import FreeMoEError

PAST, STEPS = 128, 8
"""Tokens in the cache before the decoded ones, and how many are decoded in one timing."""

_CODE = """
import copy, json, sys, time
dense, ours, sizes, rounds, threads, clock, past, steps = json.loads(sys.argv[1])
sys.modules["freemoe"] = None  # importing it fails
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(threads)
torch.set_grad_enabled(False)
now = getattr(time, clock)
models = [AutoModelForCausalLM.from_pretrained(f, trust_remote_code=True).eval() for f in (dense, ours)]
assert type(models[1]).__module__.startswith("transformers_modules"), type(models[1])
def decoding(model):
    ids = torch.randint(3, model.config.vocab_size, (1, past + steps), generator=torch.Generator().manual_seed(0))
    cache = model(ids[:, :past], use_cache=True).past_key_values
    def call():
        own = copy.deepcopy(cache)
        for place in range(past, past + steps):
            model(ids[:, place : place + 1], past_key_values=own, use_cache=True)
    return call
def prompt(model, size):
    ids = torch.randint(3, model.config.vocab_size, (1, size), generator=torch.Generator().manual_seed(0))
    return lambda: model(ids, use_cache=True, logits_to_keep=1)
found = {}
for size in sizes:
    calls = [decoding(m) if size == 1 else prompt(m, size) for m in models]
    seconds = [[], []]
    for number in range(rounds + 1):
        for side in ((0, 1), (1, 0))[number % 2]:
            began = now()
            calls[side]()
            if number:
                seconds[side].append(now() - began)
    found[size] = seconds
try:
    import freemoe
except ImportError:
    print(json.dumps(found))
"""


def seconds_alone(
    dense: Path, ours: Path, sizes: Sequence[int], threads: int, settings: Settings
) -> dict[int, tuple[list[float], list[float]]]:
    """Seconds of every round, by tokens in one call (1: decoded with a cache), of the dense folder and of ours.

    Raises:
        FreeMoEError: The folder does not run by itself; ends with what it said.
    """
    clock = one_clock(threads).__name__
    asked = [str(dense), str(ours), list(sizes), 4 * settings.rounds, threads, clock, PAST, STEPS]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(ours.parent / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, "-c", _CODE, json.dumps(asked)],
        capture_output=True, text=True, check=False, env=environment, cwd=ours.parent,
    )  # fmt: skip
    if done.returncode:
        raise FreeMoEError(f"The exported folder does not run without freemoe: {done.stderr[-2000:]}")
    return {int(size): (a, b) for size, (a, b) in json.loads(done.stdout.splitlines()[-1]).items()}
