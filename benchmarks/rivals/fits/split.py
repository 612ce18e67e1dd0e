"""Rivals that let every token use a part of a dense model: split by activations (CMoE), or learned (ToMoE)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.rivals.rival import Fitted, Materials, Terms, restored
from freemoe.domain_experts.purify.batches import mean_loss
from freemoe.evals.tasks.documents import Document
from freemoe.models.sublayers import DecoderSublayers, find_sublayers
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.gates.discretize import structure_of
from freemoe.tomoe.gates.initialise import cluster_tokens, measure_layer_importance
from freemoe.tomoe.gates.train import GateTrainer
from freemoe.tomoe.recipe import ConvertRecipe
from freemoe.tomoe.structures.masked import apply_structure
from freemoe.tomoe.structures.rivals import make_baseline, measure_activity
from freemoe.tomoe.structures.structure import Structure, active_share, to_tensors
from freemoe.training.loop import run_training_loop

EXPERTS = 8
"""Of every MLP."""


def blocks_of(documents: Sequence[Document]) -> PackedBlocks:
    """Blocks of text as rows; all have one length."""
    ids = torch.tensor([d.tokens for d in documents])
    return PackedBlocks(ids, torch.arange(ids.shape[1]).expand(ids.shape).clone())


@contextmanager
def by_activation(model: Any, materials: Materials, terms: Terms) -> Iterator[Fitted]:
    """CMoE's kind of split; the attention stays whole."""
    sublayers, blocks = find_sublayers(model), blocks_of(materials.gradient)
    routers = cluster_tokens(model, sublayers, blocks, EXPERTS, terms.seed)
    seen = measure_activity(model, sublayers, blocks, routers)
    structure = make_baseline("activation-split", sublayers, seen, routers, 1 - terms.share, 1.0)
    with apply_structure(model, structure, sublayers):
        yield _split(structure, sublayers)


@contextmanager
def learned(model: Any, materials: Materials, terms: Terms) -> Iterator[Fitted]:
    """`freemoe convert`'s training, its defaults, stopped as all others; the best look is kept."""
    schedule, sublayers = terms.schedule, find_sublayers(model)
    blocks, held_out = blocks_of(materials.gradient), blocks_of(materials.stop)
    stop = materials.batches(materials.stop)
    train = {"steps": schedule.steps, "batch_tokens": schedule.step_tokens}
    values = {"model": "-", "text": ("-",), "active": 1 - terms.share, "experts": EXPERTS, "seed": terms.seed}
    recipe = ConvertRecipe.model_validate({**values, "train": train})
    losses = [mean_loss(model, stop)]
    best: list[Structure] = []
    with restored(model, []):
        model.requires_grad_(False)
        routers = cluster_tokens(model, sublayers, blocks, EXPERTS, terms.seed)
        trainer = GateTrainer(model, sublayers, recipe, blocks)
        trainer.start_from_statistics(measure_layer_importance(model, sublayers, blocks, routers))

        def look(done: int) -> bool:
            found = structure_of(trainer, held_out)
            with apply_structure(model, found, sublayers):
                losses.append(mean_loss(model, stop))
            looks = losses[1:]
            if looks[-1] == min(looks):
                best[:] = [found]
            return len(looks) - 1 - looks.index(min(looks)) >= schedule.patience

        run_training_loop(lambda n: trainer.train_until(n + 1), look, schedule.steps, schedule.every)
    with apply_structure(model, best[0], sublayers):
        # The dense model is no look of this training: nothing goes back to it.
        yield _split(best[0], sublayers, losses)


def _split(structure: Structure, sublayers: Sequence[DecoderSublayers], losses: Sequence[float] = ()) -> Fitted:
    active = active_share(structure, sublayers)
    tensors = to_tensors(structure)
    masks = sum(-(-t.numel() // 8) for t in tensors.values() if t.dtype == torch.bool)
    values = sum(t.numel() for t in tensors.values() if t.dtype != torch.bool)
    facts = {"experts": EXPERTS, "value_masks": "per token" if losses else "none"}
    return Fitted(losses=list(losses), numbers=values, bytes=masks + 2 * values, share_off=1 - active, facts=facts)
