"""An artefact with experts of units, as a build would have written it."""

import torch

from freemoe.domain_experts.expert import DomainExpert, switch_expert, unit_expert
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.structured.units import find_units
from freemoe.models.mask import Mask
from freemoe.models.weights import find_weights
from tests.masks import mask_of
from tests.tiny import tiny_model, tiny_tokenizer


def unit_artefact(root):
    """Experts of units, even and free, one of single switches, and one that the guard turned down."""
    model = tiny_model("llama")
    units = find_units(model, "neuron")
    single = mask_of({"model.layers.0.self_attn.q_proj.weight": torch.tensor([0, 7, 90])}, find_weights(model))
    even = {n: torch.arange(2 + n, 18 + n) for n in (0, 1)}
    experts = [
        unit_expert("law/all", "neuron", units.line_indices(even), single),
        unit_expert("law/free", "neuron", units.line_indices({0: torch.arange(4)}), Mask()),
        switch_expert("law/single", single),
        DomainExpert("law/none"),
    ]
    return _written(root, model, experts)


def mixture_artefact(root):
    """An expert with one routed expert of every layer off, and a single weight beside it."""
    model = tiny_model("mixtral")
    units = find_units(model, "expert")
    off = {layer.number: torch.tensor([layer.number]) for layer in units.layers}
    single = mask_of({"model.layers.0.self_attn.q_proj.weight": torch.tensor([0, 7, 90])}, find_weights(model))
    return _written(root, model, [unit_expert("law/all", "expert", units.line_indices(off), single)])


def _written(root, model, experts):
    model.save_pretrained(root / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(root / "base")
    return FreeMoE(model, experts, tokenizer=tokenizer).save_pretrained(root / "out", base=str(root / "base"))
