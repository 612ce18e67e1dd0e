"""T18: a training step of learned switches against PEFT's LoRA of rank 1 on the same batch, and the memory of each.

LoRA is given the same chunked loss; beside it stands PEFT's own step, which makes all logits at once, and both sides once more
on the base in bfloat16 (`saliency.compute`; its fp32 weights wait beside the switches, LoRA does without). Times are taken in
turns in one process, peak memory in a process for each side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.harness import Figure, Outcome, Settings, in_own_process, in_turns, ratio
from benchmarks.rivals.training import with_lora
from benchmarks.speed.shapes import shaped_model
from freemoe.core.memory import peak_memory_bytes
from freemoe.domain_experts.purify.activations import split_by_memory
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_loss
from freemoe.domain_experts.purify.curvature import measure_curvature
from freemoe.domain_experts.purify.learned import WeightSwitches, _accumulate_gradients, _switch_topk
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.mask import Mask
from freemoe.models.precision import held_in
from freemoe.models.switching import switched_off
from freemoe.models.weights import WeightMatrix, find_weights

TIME, MEMORY = 1.6, 3.0
# A side stays in its number format until the process ends.
_FOR_GOOD = ExitStack()
SIDES = ("switches", "lora", "lora, all logits", "switches, bfloat16", "lora, bfloat16")


def run(settings: Settings) -> Outcome:
    """Time all sides in turns, then weigh each in a process of its own."""
    sides = {name: _side(name, settings) for name in SIDES}
    seconds = in_turns(sides, settings.rounds)
    memory = {name: in_own_process(__name__, [name, settings.quick, settings.seed, settings.model]) for name in SIDES}
    figures = (
        Figure("step of learned switches over LoRA r=1", ratio(seconds, SIDES[0], SIDES[1]), TIME, "lower"),
        Figure("the same over PEFT's own step, all logits at once", ratio(seconds, SIDES[0], SIDES[2])),
        Figure("step of learned switches over LoRA r=1, both in bfloat16", ratio(seconds, SIDES[3], SIDES[4])),
        Figure("peak memory of learned switches", memory[SIDES[0]] / 1e9, MEMORY, "lower", " GB"),
        *(Figure(f"peak memory of {name}", memory[name] / 1e9, unit=" GB") for name in SIDES[1:]),
    )
    details = {"threads": torch.get_num_threads(), "seconds": seconds, "bytes": memory}
    return Outcome(figures, details)


def _model(settings: Settings) -> Any:
    if settings.model is None:
        return shaped_model("135M", settings, max_position_embeddings=8192, tie_word_embeddings=True)
    return load_base(settings.model, None, "float32", "cpu")[0]


def random_batch(model: Any, settings: Settings) -> AnswerBatch:
    """2,048 tokens, all of them answers; 64 in a quick run."""
    rows, length = (2, 32) if settings.quick else (8, 256)
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(3, model.config.vocab_size, (rows, length + 1), generator=generator)
    inputs = ids[:, :-1].contiguous()
    return AnswerBatch(
        inputs.to(model.device), torch.ones_like(inputs), ids[:, 1:].contiguous(), torch.zeros(rows, dtype=torch.long)
    )


def _side(name: str, settings: Settings) -> Callable[[], None]:
    model = _model(settings)
    batch, weights = random_batch(model, settings), find_weights(model)
    half = "bfloat16" in name
    if name.startswith("switches"):
        return switches_step(model, weights, batch, half)
    if half:
        model.to(torch.bfloat16)
    return _lora(model, weights, batch, settings.seed, "all logits" in name)


def switches_step(
    model: Any, weights: list[WeightMatrix], batch: AnswerBatch, half: bool = False
) -> Callable[[], None]:
    """A step of learned switches, the curvature being measured before the first."""
    _FOR_GOOD.enter_context(held_in(model, torch.bfloat16 if half else None))
    switches = {w.name: WeightSwitches.all_on(w) for w in weights}
    curvature = measure_curvature(model, weights, [batch], checkpointing="auto")
    most = sum(w.size for w in weights) // 100
    rate = curvature.small_cost(weights) * batch.answer_tokens**0.5
    mask = Mask()
    line = math.inf

    def step() -> None:
        nonlocal mask, line
        with switched_off(weights, mask):
            _accumulate_gradients(model, switches, [batch], "auto")
        for switch in switches.values():
            switch.update_evidence(rate)
        mask, line = _switch_topk(switches, curvature, most, line)

    return step


def _lora(model: Any, weights: list[WeightMatrix], batch: AnswerBatch, seed: int, whole: bool) -> Callable[[], None]:
    tuned, parameters = with_lora(model, weights, 1, seed)
    optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for part in [batch] if whole else split_by_memory(tuned, batch):
            if whole:
                logits = tuned(input_ids=part.ids, use_cache=False).logits.flatten(0, 1).float()
                loss = torch.nn.functional.cross_entropy(
                    logits, part.targets.flatten().to(logits.device), reduction="sum"
                )
            else:
                loss = answer_loss(tuned, part)
            (loss / batch.answer_tokens).backward()
        optimizer.step()

    return step


def weigh(name: str, quick: bool, seed: int, model: str | None) -> int:
    """Peak memory of this process after two steps of a side, in bytes."""
    step = _side(name, Settings(quick=quick, seed=seed, model=model))
    step()
    step()
    return peak_memory_bytes()
