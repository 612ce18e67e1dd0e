"""What an artefact costs on this machine: seconds to switch, tokens per second alone and several at once, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freemoe.core.environment import describe_environment
from freemoe.core.errors import DataError
from freemoe.core.memory import peak_memory_bytes
from freemoe.evals.engine.scorer import context_length
from freemoe.evals.guessing import vocabulary_of
from freemoe.evals.speed import in_turns, time_sides, times_as_fast, wait_for
from freemoe.recipes.expert_names import BASE

Side = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class BenchSizes:
    """What `benchmark_artifact` is to time."""

    prompt: int = 128  # Tokens of the prompt
    new: int = 32  # Tokens of the answer
    batch: int = 4  # Sequences of the batch in which several experts answer at once
    rounds: int = 5  # How often each side is timed, in turns, after a round that warms up


def benchmark_artifact(opened: Any, sizes: BenchSizes, against: Any = None, most: int = 3) -> dict[str, Any]:
    """Time an opened artefact, every way that it can be run in turns with the first one.

    ``against``: another one, such as the dense model of a converted one: the first side, which the others are held against.
    ``most``: of so many of its experts each is timed. Gives ``requests``: per side the seconds to the first token and
    between two further ones (medians), and how many times as fast it is as the first side; ``switch`` and ``batch`` where
    there are experts; ``memory`` in bytes; ``machine``.

    Raises:
        DataError: Prompt and answer do not fit the context.
    """
    model = opened.model
    models = [model] if against is None else [model, against.model]
    room = min(map(context_length, models))
    if sizes.prompt + sizes.new > room:
        raise DataError(
            f"{sizes.prompt} tokens and {sizes.new} new ones do not fit the context of {room}: ask for fewer."
        )
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, min(map(vocabulary_of, models)), (1, sizes.prompt), generator=generator).to(model.device)
    sides = {} if against is None else {"against": partial(nullcontext, against.model)}
    sides |= _select_sides(opened, most)
    times = time_sides(sides, prompt, sizes.new, sizes.rounds)
    requests = {name: dict(zip(("first_token", "further_tokens"), parts, strict=True)) for name, parts in times.items()}
    found: dict[str, Any] = {"sizes": vars(sizes), "requests": requests}
    experts = [name for name in sides if name not in (BASE, "against")]
    if hasattr(opened, "set_expert") and experts:
        found["switch"] = {"seconds": _switch_seconds(opened, experts, sizes.rounds), "experts": experts}
        found["batch"] = _mixed_batch_speed(opened, experts, prompt, sizes)
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    memory = {"weights_bytes": sum(weights.values()), "peak_bytes": peak_memory_bytes()}
    return {**found, "memory": memory, "machine": describe_environment()}


@contextmanager
def _enter_model(model: Any, way: Side) -> Iterator[Any]:
    with way():
        yield model


def _select_sides(opened: Any, most: int) -> dict[str, Side]:
    """The base first, then the experts that were accepted, or the ways of an artefact that has none."""
    ways: Mapping[str, Side] | None = getattr(opened, "ways", None)
    if ways is None:
        accepted = [name for name in opened.experts if name not in opened.rejected]
        ways = {name: partial(opened.expert, name) for name in (BASE, *accepted[:most])}
    first = [BASE] if BASE in ways else []
    return {name: partial(_enter_model, opened.model, ways[name]) for name in (*first, *(n for n in ways if n != BASE))}


def _switch_seconds(moe: Any, experts: list[str], rounds: int) -> float:
    """Median seconds from one expert that was used before to the next, or to the base where there is one."""
    names = [*experts, *([BASE] if len(experts) == 1 else [])]
    seconds = []
    with moe.expert(BASE):  # which is there again afterwards
        for number in range((rounds + 1) * len(names)):
            began = time.perf_counter()
            moe.set_expert(names[number % len(names)])
            wait_for(moe.model.device)
            if number >= len(names):
                seconds.append(time.perf_counter() - began)
        moe.set_expert(BASE)
    return statistics.median(seconds)


def _mixed_batch_speed(moe: Any, experts: list[str], prompt: Tensor, sizes: BenchSizes) -> dict[str, Any]:
    """One batch of the base, and the same batch with several experts: tokens per second of all sequences."""
    several = experts if len(experts) > 1 else [*experts, BASE]
    names = [several[i % len(several)] for i in range(sizes.batch)]
    inputs = prompt.expand(sizes.batch, -1).contiguous()
    fixed = {"do_sample": False, "min_new_tokens": sizes.new, "max_new_tokens": sizes.new}

    def time_generation(expert: Any) -> float:
        began = time.perf_counter()
        moe.generate(inputs, attention_mask=torch.ones_like(inputs), expert=expert, **fixed)
        wait_for(moe.model.device)
        return time.perf_counter() - began

    times = in_turns({"base": partial(time_generation, BASE), "mixed": partial(time_generation, names)}, sizes.rounds)
    rates = {side: sizes.batch * sizes.new / statistics.median(seconds) for side, seconds in times.items()}
    return {"tokens_per_second": rates, "times_as_fast": times_as_fast(times["base"], times["mixed"]), "experts": names}
