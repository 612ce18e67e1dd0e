"""The hook (HookMoE Eq. 6): y = x + r W2 ReLU(W1 x), between a layer's norm and its mixture block.

Hooks stand outside of the model's tree: as submodules they would enter its checkpoints and be dropped at the next load.
W2 begins at zero, so that step 0 is the reduced model bit for bit. A hook that bends the block's input is the paper's
(``pre``); one that adds to the block's output instead (``parallel``) leaves routing as it is and can be started in closed
form. Shapes: (..., h) is the hidden state, d the hook's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freemoe.core.errors import RecipeError
from freemoe.hookmoe.plans.layers import MoELayer, moe_layers
from freemoe.models.hooks import combined_hooks, forward_hook, forward_pre_hook

SCOPES = ("block", "routed")
POSITIONS = ("pre", "parallel")
SCALE = 0.5
"""Where the trainable scalar r begins (paper)."""


class Hook(nn.Module):
    """One hook: 2 h d weights and a scalar.

    Args:
        hidden: h, width of the residual stream.
        width: d.
        bias: Give both linears a bias; the paper's have none that it mentions.
        generator: Draws W1; W2 is zero.
    """

    def __init__(self, hidden: int, width: int, bias: bool = False, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.up, self.down = _empty_linear(hidden, width, bias), _empty_linear(width, hidden, bias)
        self.r = nn.Parameter(torch.tensor(SCALE))
        bound = hidden**-0.5
        with torch.no_grad():
            if not self.up.weight.is_meta:
                self.up.weight.uniform_(-bound, bound, generator=generator)
            self.down.weight.zero_()
            for linear in (self.up, self.down) if bias else ():
                linear.bias.zero_()

    @property
    def width(self) -> int:
        """Number of hidden units, d."""
        return self.up.out_features

    def shift(self, x: Tensor) -> Tensor:
        """What the hook adds: (..., h) -> (..., h) as x is; computed in the type of the hook's weights, where they are."""
        return (self.r * self.down(F.relu(self.up(x.to(self.up.weight))))).to(x)

    def forward(self, x: Tensor) -> Tensor:
        """Eq. 6: (..., h) -> (..., h)."""
        return x + self.shift(x)


def _empty_linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A linear without numbers: torch's own start would draw from its global generator."""
    made = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, device=torch.get_default_device())
    assert isinstance(made, nn.Linear)
    return made


class HookSet(nn.Module):
    """The hooks of a model, by decoder layer, and how they are put on.

    Args:
        hooks: Layer number to hook.
        scope: ``block``: gate, routed and shared experts all see the hook's output, as in the paper. ``routed``: gate and
            routed experts do, shared experts see the raw input. They differ only where there are shared experts.
        position: ``pre`` (paper) or ``parallel``.
    """

    def __init__(self, hooks: Mapping[int, Hook], scope: str = "block", position: str = "pre") -> None:
        super().__init__()
        for name, value, allowed in (("scope", scope, SCOPES), ("position", position, POSITIONS)):
            if value not in allowed:
                raise RecipeError(f"{name} is {value!r}; allowed: {', '.join(allowed)}.")
        self.by_layer = nn.ModuleDict({str(n): hook for n, hook in sorted(hooks.items())})
        self.scope = scope
        self.position = position

    def items(self) -> list[tuple[int, Hook]]:
        """Layer numbers and hooks, lowest first."""
        return [(int(name), hook) for name, hook in self.by_layer.items()]  # pyright: ignore[reportReturnType]

    @property
    def lowest(self) -> int:
        """The lowest layer with a hook: below it nothing is trained."""
        return min(n for n, _ in self.items())

    @property
    def num_parameters(self) -> int:
        """Parameters of all hooks together."""
        return sum(p.numel() for p in self.parameters())

    def to_layer_devices(self, model: Any) -> HookSet:
        """Moved to where their layers are; layers whose weights lie on the disk run on the model's own device."""
        for layer in moe_layers(model):
            if str(layer.number) in self.by_layer:
                device = layer.device
                self.by_layer[str(layer.number)].to(model.device if device.type == "meta" else device)
        return self

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """While open, the model runs with these hooks; afterwards it is bit-equal to before.

        Raises:
            RecipeError: A hook for a layer that is dense or absent, or of another hidden size.
        """
        layers = {layer.number: layer for layer in moe_layers(model)}
        for number, hook in self.items():
            if number not in layers:
                raise RecipeError(
                    f"A hook stands at layer {number}, which is dense or absent; mixture layers: {sorted(layers)}."
                )
            if hook.up.in_features != layers[number].hidden:
                raise RecipeError(
                    f"The hook of layer {number} is for a hidden size of {hook.up.in_features}, the model has "
                    f"{layers[number].hidden}."
                )
        with ExitStack() as stack:
            for number, hook in self.items():
                stack.enter_context(_attach_hook(layers[number], hook, self.scope, self.position))
            yield


def new_hooks(
    model: Any, widths: Mapping[int, int], scope: str, position: str, bias: bool = False, seed: int = 0
) -> HookSet:
    """Fresh hooks in fp32, each on its layer's device; W1 is drawn layer by layer from one seeded generator.

    Args:
        model: A mixture model.
        widths: Layer number to d; layers with d = 0 get none.
        scope: See `HookSet`.
        position: See `HookSet`.
        bias: See `Hook`.
        seed: Of W1.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = {layer.number: layer.hidden for layer in moe_layers(model)}
    made = {n: Hook(hidden[n], d, bias, generator) for n, d in sorted(widths.items()) if d > 0 and n in hidden}
    return HookSet(made, scope, position).to_layer_devices(model)


def _attach_hook(layer: MoELayer, hook: Hook, scope: str, position: str) -> AbstractContextManager[None]:
    if position == "parallel":
        # Shared experts add to the same sum, so the scope makes no difference here.
        return forward_hook(layer.block, partial(_add_shift, hook))
    if scope == "block":
        return forward_pre_hook(layer.block, lambda module, args: (hook(args[0]), *args[1:]))
    gate, experts = _before_both(hook)
    return combined_hooks(forward_pre_hook(layer.gate, gate), forward_pre_hook(layer.experts, experts))


def _add_shift(hook: Hook, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    # GPT-OSS gives its router's scores too.
    if isinstance(output, tuple):
        return output[0] + hook.shift(args[0]).view_as(output[0]), *output[1:]
    return output + hook.shift(args[0]).view_as(output)


def _before_both(hook: Hook) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Pre-hooks of gate and experts: the gate runs first and keeps what it made for the experts."""
    made: list[Tensor] = []

    def hook_gate_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        made[:] = [hook(args[0])]
        return made[0], *args[1:]

    def replace_expert_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # DeepSeek's gate sees (batch, sequence, h), its experts (tokens, h).
        bent = made.pop().reshape(args[0].shape)
        return bent, *args[1:]

    return hook_gate_input, replace_expert_input


def allocate_units(units: int, shares: Mapping[int, float]) -> dict[int, int]:
    """Divide a budget of hidden units among layers in proportion to what each has lost (largest remainders).

    Args:
        units: d summed over all hooks.
        shares: Residual KL of each layer; negative ones count as zero, and where all are zero, all count the same.
    """
    weights = {n: max(0.0, s) for n, s in shares.items()}
    total = sum(weights.values())
    if total == 0:
        weights, total = dict.fromkeys(shares, 1.0), float(len(shares))
    exact = {n: units * w / total for n, w in weights.items()}
    widths = {n: int(e) for n, e in exact.items()}
    rest = sorted(exact, key=lambda n: (widths[n] - exact[n], n))
    for n in rest[: units - sum(widths.values())]:
        widths[n] += 1
    return widths
