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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.core.run.unit_state import NOT_KEPT, UnitState
from freemoe.kernels.gates import route
from freemoe.models.hooks import after, before, hooked, on_gradient
from freemoe.models.sublayers import Sublayers
from freemoe.text.blocks import Blocks
from freemoe.tomoe.gates.hypernetwork import Hypernetwork
from freemoe.tomoe.measure import TOKENS
from freemoe.training.distillation import language_loss
from freemoe.training.states import State, packed, unpacked

# A cluster's worth is drawn towards all tokens' by this many tokens' weight: small clusters know little.
_PRIOR_TOKENS = 64
CLUSTERED_TOKENS = 8192
_CLIP = 3.0
# How far apart the logits begin, in their own unit, which is that of the gradient's temperature.
_SPREAD = 1.0


@dataclass(frozen=True, eq=False)
class Worth:
    """One layer.

    Attributes:
        router_weight: (experts, hidden), centres of the clusters of tokens.
        router_bias: (experts,), minus half their squared lengths: the nearest centre has the largest score.
        qk: (bits,), worth per token of all text.
        vo: (head_dim,).
        vo_ranked: (head_dim,), mean over tokens of the r-th best: what is left to gain where every token has its own choice.
        mlp: (experts, width), per token of the cluster.
    """

    router_weight: Tensor
    router_bias: Tensor
    qk: Tensor
    vo: Tensor
    vo_ranked: Tensor
    mlp: Tensor


def clusters(
    model: Any,
    sublayers: Sequence[Sublayers],
    blocks: Blocks,
    experts: int,
    seed: int,
    kept: UnitState = NOT_KEPT,
) -> list[tuple[Tensor, Tensor]]:
    """Cluster the tokens at every MLP's input; returns router weight and bias per layer.

    What was read is kept between two batches, what was found between two layers.
    """
    inputs: dict[int, list[Tensor]] = {layer.number: [] for layer in sublayers}

    def keep(number: int) -> Callable[..., None]:
        return lambda module, args: inputs[number].append(args[0].detach().float().flatten(0, -2).cpu())

    needed = max(1, -(-CLUSTERED_TOKENS // blocks.length))
    device = next(model.parameters()).device

    def load(state: State) -> None:
        inputs.update({int(number): [rows] for number, rows in state.items()})

    with hooked(*(before(layer.up[0], keep(layer.number)) for layer in sublayers)), torch.no_grad():
        read = blocks.rows(range(min(needed, len(blocks)))).within(TOKENS)
        for batch in kept.part("inputs").over(
            read, lambda: {str(n): torch.cat(own) for n, own in inputs.items()}, load
        ):
            model.base_model(batch.ids.to(device), position_ids=batch.positions.to(device), use_cache=False)
    centres: list[Tensor] = []
    for layer in kept.part("centres").over(
        sublayers,
        lambda: {str(n): own for n, own in enumerate(centres)},
        lambda state: centres.extend(state[str(n)] for n in range(len(state))),
    ):
        centres.append(_centres(torch.cat(inputs[layer.number])[:CLUSTERED_TOKENS], experts, seed))
    return [(own, -0.5 * (own**2).sum(dim=1)) for own in centres]


def _centres(x: Tensor, experts: int, seed: int) -> Tensor:
    """(experts, hidden): of clusters of (tokens, hidden)."""
    from sklearn.cluster import KMeans

    count = min(experts, len(torch.unique(x, dim=0)))
    begins: Any = 1  # the stubs allow "auto" alone
    fitted = KMeans(count, n_init=begins, random_state=seed, max_iter=50).fit(x.numpy())
    centres = torch.from_numpy(fitted.cluster_centers_).float()
    # Fewer kinds of tokens than experts: the last ones are drawn near the first.
    return torch.cat([centres, *[centres[:1]] * (experts - count)])


def worths(
    model: Any,
    sublayers: Sequence[Sublayers],
    blocks: Blocks,
    routers: Sequence[tuple[Tensor, Tensor]],
    tokens: int = TOKENS,
    on_rows: Callable[[int], None] | None = None,
    kept: UnitState = NOT_KEPT,
) -> list[Worth]:
    """Sum squared gradients of masks that are all one, in one forward and backward pass over ``blocks``.

    Args:
        model: The base, frozen.
        sublayers: Of the base.
        blocks: Text.
        routers: Of `clusters`.
        tokens: Whose activations are held at once, about; at least one block. The sums do not depend on it.
        on_rows: Called with the number of finished blocks.
        kept: Where the pass keeps its sums between two batches.
    """
    device = next(model.parameters()).device
    sums = [_Sums(layer, router, device) for layer, router in zip(sublayers, routers, strict=True)]
    head = model.get_output_embeddings()
    listening = hooked(*(own.listening(layer) for layer, own in zip(sublayers, sums, strict=True)))

    def load(state: State) -> None:
        for n, own in enumerate(sums):
            own.load(unpacked(str(n), state))

    def state() -> State:
        return {key: t for n, own in enumerate(sums) for key, t in packed(str(n), own.state()).items()}

    with listening, torch.enable_grad():
        for batch in kept.over(blocks.within(tokens), state, load):
            ids, positions = (t.to(device, non_blocking=True) for t in (batch.ids, batch.positions))
            embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
            hidden = model.base_model(inputs_embeds=embedded, position_ids=positions, use_cache=False).last_hidden_state
            at, wanted = batch.next_tokens(hidden.device)
            losses = language_loss(hidden.flatten(0, 1)[at], wanted, head)
            torch.autograd.grad(losses, embedded)
            for own in sums:
                own.end_of_batch()
            if on_rows is not None:
                on_rows(len(batch))
    return [own.worth(blocks.tokens) for own in sums]


class _Sums:
    """Running sums of one layer."""

    def __init__(self, layer: Sublayers, router: tuple[Tensor, Tensor], device: torch.device) -> None:
        self.rotary = layer.rotary
        self.weight, self.bias = (t.to(device) for t in router)
        self.qk = torch.zeros(layer.rotary.bits, device=device)
        self.vo = torch.zeros(layer.rotary.head_dim, device=device)
        self.vo_ranked = torch.zeros(layer.rotary.head_dim, device=device)
        self.mlp = torch.zeros(len(self.weight), layer.width, device=device)
        self.counts = torch.zeros(len(self.weight), device=device)
        self._query: Tensor | float = 0.0
        self._value: Tensor | float = 0.0
        self._expert: Tensor | None = None

    def state(self) -> State:
        """The sums by name, between two batches."""
        return {name: getattr(self, name) for name in ("qk", "vo", "vo_ranked", "mlp", "counts")}

    def load(self, state: State) -> None:
        """Go on from a `state`."""
        for name, found in state.items():
            getattr(self, name).copy_(found)

    def listening(self, layer: Sublayers) -> AbstractContextManager[None]:
        """While open, the layer's linears are listened to."""

        # Hooks on gradients hold detached values; see `on_gradient`.
        def heads(x: Tensor, grad: Tensor) -> Tensor:
            return (x * grad).float().unflatten(-1, (-1, self.rotary.head_dim)).sum(dim=-2)

        def on_query(module: nn.Module, args: Any, output: Tensor) -> None:
            fixed = output.detach()

            def back(grad: Tensor) -> None:
                self._query = self._query + heads(fixed, grad).sum(dim=1)

            on_gradient(output, back)

        def value(x: Tensor) -> None:
            fixed = x.detach()

            def back(grad: Tensor) -> None:
                self._value = self._value + heads(fixed, grad)

            on_gradient(x, back)

        def on_value(module: nn.Module, args: Any, output: Tensor) -> None:
            value(output)

        def on_mlp(module: nn.Module, args: Any) -> None:
            self._expert = route(args[0].detach().flatten(0, -2), self.weight, self.bias)

        def on_down(module: nn.Module, args: Any) -> None:
            a, fixed, expert = args[0], args[0].detach(), self._expert
            assert expert is not None

            def back(grad: Tensor) -> None:
                squared = (fixed * grad).float().flatten(0, -2) ** 2
                self.mlp.index_add_(0, expert, squared)
                self.counts += torch.bincount(expert, minlength=len(self.counts))

            on_gradient(a, back)

        return hooked(
            after(layer.q, on_query),
            after(layer.k, on_query),
            after(layer.v, on_value),
            before(layer.o, lambda module, args: value(args[0])),
            before(layer.up[0], on_mlp),
            before(layer.down, on_down),
        )

    def end_of_batch(self) -> None:
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

    def worth(self, tokens: int) -> Worth:
        """Means per token."""
        overall = self.mlp.sum(dim=0) / tokens
        mlp = (self.mlp + _PRIOR_TOKENS * overall) / (self.counts + _PRIOR_TOKENS)[:, None]
        means = (self.qk / tokens, self.vo / tokens, self.vo_ranked / tokens, mlp)
        return Worth(self.weight.cpu(), self.bias.cpu(), *(t.cpu() for t in means))


@dataclass(frozen=True, eq=False)
class Offsets:
    """Logits to begin with, on one scale for the whole model: the logarithm of worth per weight.

    Attributes:
        qk: (bits,).
        vo: (head_dim,).
        vo_ranked: (head_dim,), descending.
        mlp: (experts, width).
    """

    qk: Tensor
    vo: Tensor
    vo_ranked: Tensor
    mlp: Tensor


def offsets(worth: Sequence[Worth], sublayers: Sequence[Sublayers]) -> list[Offsets]:
    """Put the worths of every layer on one scale."""
    found = []
    for own, layer in zip(worth, sublayers, strict=True):
        per_dim = layer.hidden * (layer.heads + layer.kv_heads)
        per_neuron = (len(layer.up) + 1) * layer.hidden
        qk = own.qk / (per_dim * layer.rotary.sizes)
        found.append(Offsets(qk, own.vo / per_dim, own.vo_ranked / per_dim, own.mlp / per_neuron))
    every = torch.cat([part.flatten() for own in found for part in (own.qk, own.vo, own.mlp)])
    # What nothing ever used is worth as little as the least that was used.
    least = every[every > 0].min() if bool((every > 0).any()) else torch.tensor(1.0)
    logs = every.clamp(min=least).log()
    middle, spread = logs.median(), logs.std().clamp(min=1e-6)

    def scaled(part: Tensor) -> Tensor:
        return _SPREAD * ((part.clamp(min=least).log() - middle) / spread).clamp(-_CLIP, _CLIP)

    return [Offsets(scaled(o.qk), scaled(o.vo), scaled(o.vo_ranked), scaled(o.mlp)) for o in found]


@torch.no_grad()
def begin(hypernetwork: Hypernetwork, worth: Sequence[Worth], sublayers: Sequence[Sublayers]) -> None:
    """Write routers and offsets into a hypernetwork whose decoders begin at zero."""
    logits = offsets(worth, sublayers)
    for attention, mlp, own, start in zip(hypernetwork.attention, hypernetwork.mlp, worth, logits, strict=True):
        # Scores as large as a softmax can tell apart; the nearest centre stays the same.
        distance = (own.router_weight - own.router_weight.mean(dim=0)).pow(2).sum(dim=1).mean().clamp(min=1e-6)
        mlp.router.weight.copy_(own.router_weight / distance)  # pyright: ignore
        mlp.router.bias.copy_(own.router_bias / distance)  # pyright: ignore
        attention.offset.copy_(torch.cat([start.vo, start.qk]))  # pyright: ignore
        mlp.offset.copy_(start.mlp)  # pyright: ignore
