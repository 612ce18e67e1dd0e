"""Rivals that train values: LoRA and DoRA (PEFT), and full tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from benchmarks.rivals.fits.masks import lowest, mask_bytes
from benchmarks.rivals.rival import Fitted, Materials, Terms, restored
from benchmarks.rivals.training import train_lora, tune
from freemoe.compat.transformers import unwrap_peft
from freemoe.models.switching import switched_off

# As a checkpoint in bfloat16 ships them, though they were trained in float32.
VALUE_BYTES = 2


@contextmanager
def low_rank(model: Any, materials: Materials, terms: Terms, *, lengths: bool = False) -> Iterator[Fitted]:
    """A pair of one rank beside every linear, trained, then merged; ``lengths`` is DoRA's further vector."""
    with restored(model, [] if materials.alone else materials.weights):
        tuned, parameters, losses = train_lora(model, materials, terms, lengths=lengths)
        kept = {f"lora|{i}": p.detach().clone() for i, p in enumerate(parameters)}
        fitted = trained_values(losses, parameters, tuned.merge_and_unload())
        fitted.tensors = kept
        yield fitted


@contextmanager
def after_a_cut(model: Any, materials: Materials, terms: Terms, *, metric: str) -> Iterator[Fitted]:
    """The weights that a metric puts lowest off, then LoRA beside what is left; the pairs stay apart, so that they stay off."""
    weights, mask = materials.weights, lowest(model, materials, terms, metric)
    # The stopping losses begin with the cut: nothing goes back to the base.
    with restored(model, []), switched_off(weights, mask):
        tuned, parameters, losses = train_lora(model, materials, terms)
        try:
            fitted = trained_values(losses, parameters, unwrap_peft(tuned))
            fitted.bytes += mask_bytes(mask)
            fitted.share_off = mask.off_share(weights)
            yield fitted
        finally:
            tuned.unload()


@contextmanager
def full(model: Any, materials: Materials, terms: Terms) -> Iterator[Fitted]:
    """All linears of the decoder's layers, trained in float32."""
    gradient, stop = materials.batches(materials.gradient), materials.batches(materials.stop)
    parameters = [w.parameter for w in materials.weights]
    with restored(model, [] if materials.alone else materials.weights):
        losses = tune(model, parameters, gradient, stop, terms.rate, terms.schedule, terms.seed)
        yield trained_values(losses, parameters)


def trained_values(losses: list[float], parameters: Sequence[nn.Parameter], model: Any = None) -> Fitted:
    """What ships trained values."""
    numbers = sum(p.numel() for p in parameters)
    return Fitted(model, losses=losses, numbers=numbers, bytes=VALUE_BYTES * numbers)
