"""T5: switching between two experts that were used before, against copying all masked weights once.

The rival holds the masked weights of the expert ready and copies every matrix that the expert touches, which is what
an expert costs at the least where weights are exchanged. Ours holds what the experts switch off, and nothing else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Figure, Outcome, Settings, in_turns, ratio
from benchmarks.speed.shapes import shaped_model
from freemoe.core.errors import NumericError
from freemoe.domain_experts.rank.bands import Band, band_mask
from freemoe.domain_experts.rank.random_mask import random_mask
from freemoe.models.mask import Mask
from freemoe.models.switchboard import ExpertCache
from freemoe.models.switching import switched_off
from freemoe.models.weights import WeightMatrix, find_weights

TARGET = 1.5
DTYPES = (torch.float32, torch.bfloat16)
# A switching takes hundredths of a second, so that one repeat says little.
CALLS = 4


@dataclass(frozen=True)
class Case:
    """Two experts of one kind: a band of a width, or single switches of a share."""

    kind: str
    share: float

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"band of {self.share:.0%} width" if self.kind == "band" else f"single switches, {self.share:.0%} off"

    def mask(self, weights: list[WeightMatrix], seed: int) -> Mask:
        """What the expert of a seed switches off."""
        if self.kind == "band":
            generator = torch.Generator().manual_seed(seed)
            norms = {w.tap: torch.rand(w.num_experts, w.num_columns, generator=generator) + 0.01 for w in weights}
            return band_mask(Band("wanda", 0.0, self.share), weights, norms.__getitem__)
        first = {w.name: torch.arange(round(w.size * self.share)) for w in weights}
        return random_mask(Mask.of_indices(first, weights), seed)


CASES = (Case("band", 0.1), Case("band", 0.05), Case("switches", 0.01))


def run(settings: Settings) -> Outcome:
    """Measure every kind of expert at every precision."""
    figures: list[Figure] = []
    details: dict[str, Any] = {"threads": torch.get_num_threads()}
    with settings.progress.stage("switch", len(DTYPES) * len(CASES)) as advance:
        for dtype in DTYPES:
            model = shaped_model("118M", settings).to(dtype)
            weights = find_weights(model)
            details["weights"] = sum(w.size for w in weights)
            for case in CASES:
                name = f"{case.name}, {str(dtype).removeprefix('torch.')}"
                found, more = _contest(weights, case, settings)
                figures.append(Figure(f"switching, {name}", found, TARGET, "lower", note=more.pop("note")))
                details[name] = more
                advance(1)
    return Outcome(tuple(figures), details)


def _contest(weights: list[WeightMatrix], case: Case, settings: Settings) -> tuple[float, dict[str, Any]]:
    """Ratio of switching to copying, and what belongs beside it."""
    experts = {name: case.mask(weights, settings.seed + i) for i, name in enumerate("ab")}
    masked = {name: _masked(weights, mask) for name, mask in experts.items()}
    board = ExpertCache(weights)
    first: list[float] = []
    for name, mask in experts.items():
        began = time.perf_counter()
        board.add_expert(name, mask)
        board.activate_expert(name)
        first.append(time.perf_counter() - began)
        _check(weights, masked[name])
    # Somewhere else, so that the board's weights stay its own; the same memory and the same work.
    target = [torch.empty_like(w.parameter.detach()) for w in weights]

    def switch() -> None:
        board.activate_expert("a" if board.active_expert == "b" else "b")

    def copy() -> None:
        for into, weight in zip(target, weights, strict=True):
            into.copy_(masked["a"][weight.name])

    rounds = 1 if settings.quick else CALLS * settings.rounds
    seconds = in_turns({"switch": switch, "copy": copy}, rounds)
    assert board.active_expert is not None
    _check(weights, masked[board.active_expert])
    board.activate_expert("b" if board.active_expert == "a" else "a")
    _check(weights, masked[board.active_expert])
    held, off = board.held_bytes("a"), experts["a"].count
    base = sum(w.size * w.parameter.element_size() for w in weights)
    board.activate_expert(None)
    _check(weights, _base(weights, masked))
    share = held / base
    began = time.perf_counter()
    # From a mask alone, as a search does it.
    switched_off(weights, experts["a"]).close()
    without_holding = round(time.perf_counter() - began, 4)
    return ratio(seconds, "switch", "copy"), {
        "note": f"holds {held / off:g} bytes per switched-off weight, {share:.1%} of the weights per expert; bit-equal",
        "bytes_held": held,
        "switched_off": off,
        "share_of_base": share,
        "seconds_first_use": [round(s, 4) for s in first],
        "seconds_without_holding": without_holding,
        "seconds": {side: [round(s, 5) for s in values] for side, values in seconds.items()},
    }


def _masked(weights: list[WeightMatrix], mask: Mask) -> dict[str, Tensor]:
    """Copies of the weights with what an expert has off at zero."""
    found = {w.name: w.parameter.detach().clone() for w in weights}
    for weight in weights:
        found[weight.name].view(-1)[mask[weight.name].to_bools()] = 0
    return found


def _base(weights: list[WeightMatrix], masked: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The base's weights, as far as two masked copies know them: where one is off, the other's value."""
    a, b = masked["a"], masked["b"]
    known = {w.name: torch.where(a[w.name] != 0, a[w.name], b[w.name]) for w in weights}
    # Where both are off only the weights themselves know.
    return {w.name: torch.where(known[w.name] != 0, known[w.name], w.parameter.detach()) for w in weights}


def _check(weights: list[WeightMatrix], expected: dict[str, Tensor]) -> None:
    for weight in weights:
        if not torch.equal(weight.parameter.detach(), expected[weight.name]):
            raise NumericError(f"{weight.name} is not what the expert's masked copy says.")
