"""Where training begins: what each weight is worth to the loss, and which tokens belong together.

The worth of a unit (a neuron for a token, a value dimension for a token, a rotary bit for a sequence) is its squared
gradient: half of it is the second-order rise of the loss when the unit is dropped. Divided by the weights that the unit
costs it compares units of all sublayers. Experts begin as clusters of tokens (k-means on the MLP's input), each wanting
the neurons that are worth most to its own tokens. The paper begins at random instead; it then needs thousands of steps
to find what one pass over some text says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.evals.engine.output_head import forward_blocks, forward_blocks_to_head, summed_loss
from freemoe.kernels.gates import route_tokens
from freemoe.models.hooks import combined_hooks, forward_hook, forward_pre_hook, on_gradient
from freemoe.models.sublayers import DecoderSublayers
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.gates.hypernetwork import Hypernetwork
from freemoe.training.states import State, pack_state, unpack_state

# A cluster's worth is drawn towards all tokens' by this many tokens' weight: small clusters know little.
_PRIOR_TOKENS = 64
CLUSTERED_TOKENS = 8192
_CLIP = 3.0
# How far apart the logits begin, in their own unit, which is that of the gradient's temperature.
_SPREAD = 1.0


WORTHS = ("qk", "vo", "vo_ranked", "mlp")
"""What of a layer has a worth: attributes of `LayerImportance`."""


@dataclass(frozen=True, eq=False)
class LayerImportance:
    """What the statistics say of one layer."""

    router_weight: Tensor  # (experts, hidden), centres of the clusters of tokens
    router_bias: Tensor  # (experts,), minus half their squared lengths: the nearest centre has the largest score
    qk: Tensor  # (bits,), worth per token of all text
    vo: Tensor  # (head_dim,)
    # (head_dim,), mean over tokens of the r-th best: what is left to gain where every token has its own choice
    vo_ranked: Tensor
    mlp: Tensor  # (experts, width), per token of the cluster


def cluster_tokens(
    model: Any,
    sublayers: Sequence[DecoderSublayers],
    blocks: PackedBlocks,
    experts: int,
    seed: int,
    checkpoint: UnitState = NO_CHECKPOINT,
) -> list[tuple[Tensor, Tensor]]:
    """Cluster the tokens at every MLP's input; returns router weight and bias per layer.

    What was read is kept between two batches, what was found between two layers.
    """
    inputs: dict[int, list[Tensor]] = {layer.number: [] for layer in sublayers}

    def keep_input(number: int, module: nn.Module, args: Any) -> None:
        inputs[number].append(args[0].detach().float().flatten(0, -2).cpu())

    needed = max(1, -(-CLUSTERED_TOKENS // blocks.row_length))

    def load_state(state: State) -> None:
        inputs.update({int(number): [rows] for number, rows in state.items()})

    with (
        combined_hooks(*(forward_pre_hook(layer.up[0], partial(keep_input, layer.number)) for layer in sublayers)),
        torch.no_grad(),
    ):
        read = blocks.select_rows(range(min(needed, len(blocks)))).iter_batches()
        for batch in checkpoint.part_state("inputs").resume_iter(
            read, lambda: {str(n): torch.cat(own) for n, own in inputs.items()}, load_state
        ):
            forward_blocks(model, batch)
    centres: list[Tensor] = []
    for layer in checkpoint.part_state("centres").resume_iter(
        sublayers,
        lambda: {str(n): own for n, own in enumerate(centres)},
        lambda state: centres.extend(state[str(n)] for n in range(len(state))),
    ):
        centres.append(_kmeans_centres(torch.cat(inputs[layer.number])[:CLUSTERED_TOKENS], experts, seed))
    return [(own, -0.5 * (own**2).sum(dim=1)) for own in centres]


def _kmeans_centres(x: Tensor, experts: int, seed: int) -> Tensor:
    """(experts, hidden): of clusters of (tokens, hidden)."""
    from sklearn.cluster import KMeans

    count = min(experts, len(torch.unique(x, dim=0)))
    begins: Any = 1  # the stubs allow "auto" alone
    fitted = KMeans(count, n_init=begins, random_state=seed, max_iter=50).fit(x.numpy())
    centres = torch.from_numpy(fitted.cluster_centers_).float()
    # Fewer kinds of tokens than experts: the last ones are drawn near the first.
    return torch.cat([centres, *[centres[:1]] * (experts - count)])


def measure_layer_importance(
    model: Any,
    sublayers: Sequence[DecoderSublayers],
    blocks: PackedBlocks,
    routers: Sequence[tuple[Tensor, Tensor]],
    tokens: int | None = None,
    on_rows: Callable[[int], None] | None = None,
    checkpoint: UnitState = NO_CHECKPOINT,
) -> list[LayerImportance]:
    """Sum squared gradients of masks that are all one, in one forward and backward pass over ``blocks``.

    About ``tokens`` have their activations held at once, at least one block: the sums do not depend on it. ``on_rows`` is
    called with the number of finished blocks.
    """
    device = next(model.parameters()).device
    sums = [_ImportanceSums(layer, router, device) for layer, router in zip(sublayers, routers, strict=True)]
    listening = combined_hooks(*(own.collect_gradients(layer) for layer, own in zip(sublayers, sums, strict=True)))

    def load_state(state: State) -> None:
        for n, own in enumerate(sums):
            own.load_state(unpack_state(str(n), state))

    def to_state() -> State:
        return {key: t for n, own in enumerate(sums) for key, t in pack_state(str(n), own.to_state()).items()}

    with listening, torch.enable_grad():
        for batch in checkpoint.resume_iter(blocks.iter_batches(tokens), to_state, load_state):
            embedded = model.get_input_embeddings()(batch.ids.to(device, non_blocking=True)).detach().requires_grad_()
            at, wanted = batch.next_tokens(device)
            losses = summed_loss(forward_blocks_to_head(model, batch, at, inputs_embeds=embedded), wanted)
            torch.autograd.grad(losses, embedded)
            for own in sums:
                own.add_batch()
            if on_rows is not None:
                on_rows(len(batch))
    return [own.mean_importance(blocks.num_tokens) for own in sums]


class _ImportanceSums:
    """Running sums of one layer."""

    def __init__(self, layer: DecoderSublayers, router: tuple[Tensor, Tensor], device: torch.device) -> None:
        self.rotary = layer.rotary
        self.weight, self.bias = (t.to(device) for t in router)
        self.qk = torch.zeros(layer.rotary.num_bits, device=device)
        self.vo = torch.zeros(layer.rotary.head_dim, device=device)
        self.vo_ranked = torch.zeros(layer.rotary.head_dim, device=device)
        self.mlp = torch.zeros(len(self.weight), layer.intermediate_size, device=device)
        self.counts = torch.zeros(len(self.weight), device=device)
        self._query: Tensor | float = 0.0
        self._value: Tensor | float = 0.0
        self._expert: Tensor | None = None

    def to_state(self) -> State:
        """The sums by name, between two batches."""
        return {name: getattr(self, name) for name in ("qk", "vo", "vo_ranked", "mlp", "counts")}

    def load_state(self, state: State) -> None:
        """Go on from a `state`."""
        for name, found in state.items():
            getattr(self, name).copy_(found)

    def collect_gradients(self, layer: DecoderSublayers) -> AbstractContextManager[None]:
        """While open, the layer's linears are listened to."""

        # Hooks on gradients hold detached values; see `on_gradient`.
        def sum_over_heads(x: Tensor, grad: Tensor) -> Tensor:
            return (x * grad).float().unflatten(-1, (-1, self.rotary.head_dim)).sum(dim=-2)

        def on_query(module: nn.Module, args: Any, output: Tensor) -> None:
            fixed = output.detach()

            def add_query_gradient(grad: Tensor) -> None:
                self._query = self._query + sum_over_heads(fixed, grad).sum(dim=1)

            on_gradient(output, add_query_gradient)

        def track_value(x: Tensor) -> None:
            fixed = x.detach()

            def add_value_gradient(grad: Tensor) -> None:
                self._value = self._value + sum_over_heads(fixed, grad)

            on_gradient(x, add_value_gradient)

        def on_mlp(module: nn.Module, args: Any) -> None:
            self._expert = route_tokens(args[0].detach().flatten(0, -2), self.weight, self.bias)

        def on_down(module: nn.Module, args: Any) -> None:
            a, fixed, expert = args[0], args[0].detach(), self._expert
            assert expert is not None

            def add_neuron_gradient(grad: Tensor) -> None:
                squared = (fixed * grad).float().flatten(0, -2) ** 2
                self.mlp.index_add_(0, expert, squared)
                self.counts += torch.bincount(expert, minlength=len(self.counts))

            on_gradient(a, add_neuron_gradient)

        return combined_hooks(
            forward_hook(layer.q, on_query),
            forward_hook(layer.k, on_query),
            forward_hook(layer.v, lambda module, args, output: track_value(output)),
            forward_pre_hook(layer.o, lambda module, args: track_value(args[0])),
            forward_pre_hook(layer.up[0], on_mlp),
            forward_pre_hook(layer.down, on_down),
        )

    def add_batch(self) -> None:
        """Gradients are squared: those of Q and K together per row, those of V and O together per token."""
        assert isinstance(self._query, Tensor)
        assert isinstance(self._value, Tensor)
        pairs = self.rotary.turned // 2
        turned = self._query[:, : 2 * pairs].unflatten(1, (2, pairs)).sum(dim=1)
        self.qk += (torch.cat([turned, self._query[:, 2 * pairs :]], dim=1) ** 2).sum(dim=0)
        squared = self._value**2
        self.vo += squared.sum(dim=(0, 1))
        self.vo_ranked += squared.sort(dim=-1, descending=True).values.sum(dim=(0, 1))
        self._query = self._value = 0.0

    def mean_importance(self, tokens: int) -> LayerImportance:
        overall = self.mlp.sum(dim=0) / tokens
        mlp = (self.mlp + _PRIOR_TOKENS * overall) / (self.counts + _PRIOR_TOKENS)[:, None]
        means = (self.qk / tokens, self.vo / tokens, self.vo_ranked / tokens, mlp)
        return LayerImportance(self.weight.cpu(), self.bias.cpu(), *(t.cpu() for t in means))


def initial_logits(worth: Sequence[LayerImportance], sublayers: Sequence[DecoderSublayers]) -> list[LayerImportance]:
    """Logits to begin with, on one scale for the whole model: the logarithm of every layer's worths per weight."""
    found = []
    for own, layer in zip(worth, sublayers, strict=True):
        per_dim = layer.hidden_size * (layer.heads + layer.kv_heads)
        per_neuron = (len(layer.up) + 1) * layer.hidden_size
        qk = own.qk / (per_dim * layer.rotary.bit_sizes)
        found.append((qk, own.vo / per_dim, own.vo_ranked / per_dim, own.mlp / per_neuron))
    every = torch.cat([part.flatten() for qk, vo, _, mlp in found for part in (qk, vo, mlp)])
    # What nothing ever used is worth as little as the least that was used.
    least = every[every > 0].min() if bool((every > 0).any()) else torch.tensor(1.0)
    logs = every.clamp(min=least).log()
    middle, spread = logs.median(), logs.std().clamp(min=1e-6)

    def standardise_logits(part: Tensor) -> Tensor:
        return _SPREAD * ((part.clamp(min=least).log() - middle) / spread).clamp(-_CLIP, _CLIP)

    return [
        replace(own, **dict(zip(WORTHS, map(standardise_logits, parts), strict=True)))
        for own, parts in zip(worth, found, strict=True)
    ]


@torch.no_grad()
def initialise_gates(
    hypernetwork: Hypernetwork, worth: Sequence[LayerImportance], sublayers: Sequence[DecoderSublayers]
) -> None:
    """Write routers and offsets into a hypernetwork whose decoders begin at zero."""
    logits = initial_logits(worth, sublayers)
    for attention, mlp, own, start in zip(hypernetwork.attention, hypernetwork.mlp, worth, logits, strict=True):
        # Scores as large as a softmax can tell apart; the nearest centre stays the same.
        distance = (own.router_weight - own.router_weight.mean(dim=0)).pow(2).sum(dim=1).mean().clamp(min=1e-6)
        mlp.router.weight.copy_(own.router_weight / distance)  # pyright: ignore
        mlp.router.bias.copy_(own.router_bias / distance)  # pyright: ignore
        attention.offset.copy_(torch.cat([start.vo, start.qk]))  # pyright: ignore
        mlp.offset.copy_(start.mlp)  # pyright: ignore
