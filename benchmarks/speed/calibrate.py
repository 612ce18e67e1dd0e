"""T3: calibration of all subdomains and all norms in one pass, over a plain forward pass of the same batches.

The plain pass is the base without its head, without gradients: the least that any calibration costs. Documents of
twelve subdomains (three domains of four clusters) are mixed within every batch of 2,048 tokens.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from benchmarks.harness import Figure, Outcome, Settings, in_turns, ratio
from benchmarks.speed.shapes import shaped_model
from freemoe.core.errors import NumericError
from freemoe.domain_experts.rank.calibrate import POWERS, Batch, InputNorms, calibrate
from freemoe.models.taps import tap_inputs
from freemoe.models.weights import find_weights

TARGET = 1.15
GROUPS = 12
ROWS, LENGTH = 16, 128


def run(settings: Settings) -> Outcome:
    """Measure a dense model at fp32, which is judged, and beside it bf16 and routed experts."""
    details: dict[str, Any] = {"threads": torch.get_num_threads(), "subdomains": GROUPS, "norms": len(POWERS)}
    with settings.progress.stage("calibrate", 3) as advance:
        model = shaped_model("134M", settings)
        found, details["dense, float32"] = contest(model, settings, 2, settings.rounds)
        figures = [Figure("calibration over a plain forward pass, dense, float32", found, TARGET, "lower")]
        advance(1)
        found, details["dense, bfloat16"] = contest(model.to(torch.bfloat16), settings, 1, 1)
        figures.append(Figure("the same in bfloat16", found, note="one round"))
        advance(1)
        experts = shaped_model("small experts", settings)
        found, details["routed experts, float32"] = contest(experts, settings, 1, settings.rounds)
        figures.append(
            Figure("routed experts (32, 4 per token), float32", found, note="a norm per expert; outputs bit-equal")
        )
        advance(1)
    return Outcome(tuple(figures), details)


def _batches(model: Any, count: int, settings: Settings) -> list[Batch]:
    """Batches of documents of unequal length, padded on the right, their subdomains mixed."""
    rng = random.Random(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    rows, length = (4, 24) if settings.quick else (ROWS, LENGTH)
    found = []
    for _ in range(count):
        ids = torch.randint(3, model.config.vocab_size, (rows, length), generator=generator)
        lengths = torch.tensor([length, *(rng.randint(length // 2, length) for _ in range(rows - 1))])
        mask = (torch.arange(length) < lengths[:, None]).long()
        labels = torch.tensor([rng.randrange(GROUPS) for _ in range(rows)])
        found.append((ids.to(model.device), mask.to(model.device), labels.to(model.device)))
    return found


def contest(model: Any, settings: Settings, count: int, rounds: int) -> tuple[float, dict[str, Any]]:
    """Ratio of calibrating to running, and what belongs beside it."""
    weights = find_weights(model)
    batches = _batches(model, count, settings)
    results: list[InputNorms] = []

    @torch.no_grad()
    def plain() -> None:
        for ids, mask, _ in batches:
            model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)

    def ours() -> None:
        results[:] = [calibrate(model, weights, batches, GROUPS)]

    seconds = in_turns({"calibrate": ours, "plain": plain}, rounds)
    _check(model, weights, batches[0], results[0], alone=count == 1)
    return ratio(seconds, "calibrate", "plain"), {
        "parameters": sum(p.numel() for p in model.parameters()),
        "batches": count,
        "tokens": sum(ids.numel() for ids, _, _ in batches),
        "inputs": len(results[0].sums),
        "seconds": {side: [round(s, 4) for s in values] for side, values in seconds.items()},
    }


@torch.no_grad()
def _check(model: Any, weights: Any, batch: Batch, norms: InputNorms, alone: bool) -> None:
    """Raise unless the first batch's sums are what adding up its inputs gives, and outputs are the plain pass's."""
    ids, mask, labels = batch
    token_labels = torch.where(mask.bool(), labels[:, None], -1).reshape(-1)
    first = next(w.tap for w in weights)
    expected: dict[int, torch.Tensor] = {}

    def on_input(tap: str, expert: int, x: torch.Tensor, token: torch.Tensor) -> None:
        if tap == first:
            for group in range(GROUPS):
                here = x[token_labels[token] == group].double().abs()
                if len(here):
                    expected[group] = torch.stack([here.sum(0), (here**2).sum(0), (here**4).sum(0), here.amax(0)])

    bare = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    with tap_inputs(model, weights, on_input):
        seen = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    if not torch.equal(bare, seen):
        raise NumericError("The model's outputs change while its inputs are read.")
    for group, sums in expected.items():
        sums = sums.cpu()
        found = norms.sums[first][group, :, 0]
        if bool((found < sums * (1 - 1e-4)).any()) or (alone and bool((found > sums * (1 + 1e-4)).any())):
            raise NumericError(f"The sums of {first} for subdomain {group} are not those of its tokens.")
