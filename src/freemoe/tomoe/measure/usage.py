"""What a converted model's experts are and do, as plain data: the figures of ToMoE Sec. 4.4 and App. E.

What a result or a structure says needs no model; which expert a token goes to is read off the converted model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import DataError
from freemoe.kernels.gates import route_tokens
from freemoe.models.hooks import combined_hooks, forward_pre_hook
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.structures.structure import Structure

# ------------------------------------------------------------------------------------------- widths


def layer_widths(result: dict[str, Any]) -> list[dict[str, float]]:
    """Shares of the dense model that each layer keeps (ToMoE Fig. 5, 6a and 7).

    Args:
        result: Of ``freemoe convert``.

    Returns:
        Per layer: ``query_key`` and ``value_output`` dimensions of a head, ``mlp`` (neurons of the widest expert), and
        ``union`` (neurons that some expert has), each over the dense layer's.
    """
    return [
        {
            "layer": number,
            "query_key": layer.get("head_share", 1.0) * layer["query_dims"] / layer["head_dim"],
            "value_output": layer.get("head_share", 1.0) * layer["value_dims"] / layer["head_dim"],
            "mlp": max(layer["widths"]) / layer["width"],
            "union": layer["union"] / layer["width"],
        }
        for number, layer in enumerate(result["layers"])
    ]


def expert_widths(result: dict[str, Any]) -> list[dict[str, float]]:
    """Five numbers of a box per layer: neurons of its experts (ToMoE Fig. 8).

    Returns:
        Per layer ``least``, ``lower`` (quartile), ``median``, ``upper`` and ``most``, in neurons. With equal widths
        (``gates.equal_widths``) all five are one.
    """
    boxes = []
    for number, layer in enumerate(result["layers"]):
        widths = torch.tensor(layer["widths"], dtype=torch.float64)
        values = torch.quantile(widths, torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)).tolist()
        boxes.append({"layer": number, **dict(zip(("least", "lower", "median", "upper", "most"), values, strict=True))})
    return boxes


def expert_similarity(structure: Structure) -> list[list[list[float]]]:
    """How much the experts of each layer share (ToMoE Fig. 9).

    Returns:
        Per layer (experts, experts): neurons that both have over neurons that one of them has (Jaccard).
    """
    return [_jaccard_similarity(layer.experts.double()).tolist() for layer in structure]


def training_dynamics(result: dict[str, Any]) -> dict[str, list[float]]:
    """The terms of the loss and the active share by step (ToMoE Fig. 3), and the held-out perplexity of saved states.

    Returns:
        ``step`` from 1 and a list per column of the history; ``held_out_step``, ``held_out_perplexity`` and, where a mean
        of the gates was kept, ``held_out_mean_perplexity``, whose first entry is the start's.
    """
    rows, curve = result["history"]["rows"], result["held_out_curve"]
    found = {"step": [float(n) for n in range(1, len(rows) + 1)]}
    found |= {name: [row[n] for row in rows] for n, name in enumerate(result["history"]["columns"])}
    found |= {"held_out_step": [p["step"] for p in curve], "held_out_perplexity": [p["perplexity"] for p in curve]}
    if any("mean_perplexity" in point for point in curve):
        found["held_out_mean_perplexity"] = [p.get("mean_perplexity", p["perplexity"]) for p in curve]
    return found


# ------------------------------------------------------------------------------------------- tokens


@torch.no_grad()
def experts_of_tokens(model: Any, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """The expert that each token goes to in every layer.

    From ids and, of packed blocks, positions (rows, tokens) to (layers, rows, tokens) int64.

    Raises:
        DataError: The model has no routers.
    """
    # Named as `tomoe.modules.MixtureMLP` has it; a folder's own copy of that class is another class.
    mixtures = [m for name, m in model.named_modules() if name.endswith("mlp") and hasattr(m, "experts")]
    if not mixtures:
        raise DataError(
            f"{type(model).__name__} has no routers of experts. Give a model that freemoe convert has written."
        )
    seen: list[Tensor] = []

    def make_router_hook(mixture: Any) -> Callable[..., None]:
        router = mixture.router
        return lambda module, args: seen.append(route_tokens(args[0], router.weight, router.bias))

    device = model.device
    options = {} if positions is None else {"position_ids": positions.to(device), "use_cache": False}
    with combined_hooks(*(forward_pre_hook(mixture, make_router_hook(mixture)) for mixture in mixtures)):
        model.base_model(ids.to(device), **options)
    return torch.stack([expert.view(ids.shape).cpu() for expert in seen])


def expert_usage(model: Any, blocks: PackedBlocks) -> list[list[float]]:
    """The share of a text's tokens that each expert is given, by layer (ToMoE Fig. 4)."""
    chosen = _chosen_experts(model, blocks)
    return [(torch.bincount(layer, minlength=n).double() / len(layer)).tolist() for layer, n in chosen]


def shared_tokens(model: Any, blocks: PackedBlocks) -> Tensor:
    """How far experts of all layers go together: tokens that both are given over tokens that one of them is.

    Returns:
        (layers * experts, layers * experts) float64, layer by layer; experts of one layer share no token.
    """
    onehot = [torch.nn.functional.one_hot(layer, n).T.double() for layer, n in _chosen_experts(model, blocks)]
    return _jaccard_similarity(torch.cat(onehot))


def token_experts(model: Any, tokenizer: Any, text: str, layers: Sequence[int] = (-1,)) -> list[dict[str, Any]]:
    """A text's tokens and the experts that they go to (ToMoE Tab. 7, 11 and 14).

    Args:
        model: A converted model.
        tokenizer: Its own.
        text: Short enough for the model's context.
        layers: Which layers, from 0; negative ones count from the last.

    Returns:
        Per token ``token`` (its text) and ``experts``, one per layer asked for.
    """
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    experts = experts_of_tokens(model, ids)[list(layers), 0].T.tolist()
    return [{"token": tokenizer.decode(one), "experts": own} for one, own in zip(ids[0].tolist(), experts, strict=True)]


def _chosen_experts(model: Any, blocks: PackedBlocks) -> list[tuple[Tensor, int]]:
    """Per layer the expert of every token, and how many experts there are."""
    parts = [experts_of_tokens(model, batch.ids, batch.positions).flatten(1) for batch in blocks.iter_batches()]
    counts = [len(own["widths"]) for own in model.config.tomoe["layers"]]
    return list(zip(torch.cat(parts, dim=1), counts, strict=True))


def _jaccard_similarity(members: Tensor) -> Tensor:
    """(n, size) of zeros and ones -> (n, n); zero where both are empty."""
    both = members @ members.T
    sizes = members.sum(dim=1)
    return both / (sizes[:, None] + sizes[None] - both).clamp(min=1)
