"""Taps: see what every weight multiplies.

Fused experts hide what their down projection multiplies. Where all rows pass their gate at once (``grouped_mm``,
the default, and ``batched_mm``) it is overheard there, and costs nothing; elsewhere (``eager``) it is computed once
more, which is up to two thirds of the experts' work. Either way the model computes exactly what it computes without
taps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freemoe.compat.transformers import Gate, experts_backend, gate_of, gate_replaced
from freemoe.core.errors import FamilyError
from freemoe.kernels.waits import numbers_of
from freemoe.models.hooks import combined_hooks, forward_hook, forward_pre_hook
from freemoe.models.offload import read_parameter
from freemoe.models.spec import ExpertsLayout, family_of, modules_seen
from freemoe.models.weights import WeightMatrix

OnInput = Callable[[str, int, Tensor, Tensor], None]


@contextmanager
def tap_inputs(model: nn.Module, weights: Sequence[WeightMatrix], on_input: OnInput) -> Iterator[None]:
    """While open, call ``on_input(tap, expert, x, token)`` for every input that a weight multiplies.

    A dense tap calls once per forward (expert 0); a tap of fused experts calls once per expert that some
    token was routed to. Outputs are bit-equal to those without taps. Taps nest, and are gone afterwards, also
    after an error.

    Args:
        model: The model that ``weights`` were found in.
        weights: From ``find_weights``; their distinct taps are listened to.
        on_input: Gets the tap's name, the expert's number, x (tokens, columns) detached, and token (tokens,)
            int64 on the host: for each row of x its index in the flattened (batch * sequence) of this forward. The
                caller drops padding.

    Raises:
        FamilyError: A tap's module is not in this model.
    """
    with ExitStack() as stack:
        fused: dict[str, set[str]] = {}
        for tap, layout in dict.fromkeys((w.tap, w.is_fused) for w in weights):
            if layout:
                fused.setdefault(tap.rpartition(".")[0], set()).add(tap)
            else:
                stack.enter_context(forward_pre_hook(_get_module(model, tap), _dense_hook(tap, on_input), kwargs=True))
        for path, taps in fused.items():
            experts = family_of(model).experts
            if experts is None:
                raise FamilyError(f"{path} is asked for, but family {family_of(model).name!r} has no fused experts.")
            module = _get_module(model, path)
            gate = stack.enter_context(_record_gate(module))
            forget, tell = _expert_hooks(path, taps, experts, gate, on_input)
            stack.enter_context(
                combined_hooks(forward_pre_hook(module, forget), forward_hook(module, tell, kwargs=True))
            )
        yield


def _get_module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise FamilyError(
            f"No module {path!r} to tap in {type(model).__name__}; {modules_seen(model)}. Find the weights "
            "in the same model object that is tapped."
        ) from error


def _dense_hook(tap: str, on_input: OnInput) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = (args[0] if args else next(iter(kwargs.values()))).detach()
        # Some families flatten (batch, sequence) before a linear, some do not; the order of tokens is the
        # same.
        x = x.reshape(-1, x.shape[-1])
        on_input(tap, 0, x, torch.arange(x.shape[0]))

    return hook


class _RecordedGate(NamedTuple):
    """The experts' own gate, and what it gave out since ``heard`` was last cleared: the down projection's input."""

    gate: Gate
    heard: list[Tensor]


@contextmanager
def _record_gate(module: Any) -> Iterator[_RecordedGate]:
    """Stand in the place of the experts' gate and pass on what it says."""
    gate = _RecordedGate(gate_of(module), [])

    def record_output(out: Tensor) -> Tensor:
        gated = gate.gate(out)
        gate.heard.append(gated.detach())
        return gated

    with gate_replaced(module, record_output):
        yield gate


def _expert_hooks(
    path: str, taps: set[str], experts: ExpertsLayout, gate: _RecordedGate, on_input: OnInput
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks before and after the experts' forward."""
    up, down = f"{path}.{experts.up}", f"{path}.{experts.down}"

    def clear_recorded(*_: Any) -> None:
        gate.heard.clear()

    @torch.no_grad()
    def report_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # Families name these arguments differently; their order is always hidden states, index, weights.
        hidden, index, *_ = inspect.signature(module.forward).bind(*args, **kwargs).arguments.values()
        hidden = hidden.detach().reshape(-1, hidden.shape[-1])
        # The host has to know what each expert was given: it reads that at once, and never waits for one of them.
        index = index.reshape(hidden.shape[0], -1).cpu()
        heard = _recorded_rows(module, experts, gate, hidden, index) if down in taps else None
        gate.heard.clear()
        # A slot is one token's use of one expert. An index equal to the number of experts marks a dropped slot.
        count = getattr(module, experts.up).shape[0]
        sizes = torch.bincount(index.reshape(-1), minlength=count)[:count].tolist()
        slots = torch.sort(index.reshape(-1), stable=True).indices[: sum(sizes)]
        there = slots.to(hidden.device, non_blocking=True)
        for expert, (here, own) in enumerate(zip(slots.split(sizes), there.split(sizes), strict=True)):
            if len(here) == 0:
                continue
            token, x = here // index.shape[1], hidden.index_select(0, own // index.shape[1])
            if up in taps:
                on_input(up, expert, x, token)
            if down in taps:
                inner = _intermediate_states(module, gate, experts, expert, x) if heard is None else heard(own)
                on_input(down, expert, inner, token)

    return clear_recorded, report_inputs


def _recorded_rows(
    module: Any, experts: ExpertsLayout, gate: _RecordedGate, hidden: Tensor, index: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """How to look up the rows that were overheard of some slots; None where they cannot be told apart.

    ``hidden``: (tokens, columns), the experts' input; ``index``: (tokens, k), on the host.
    """
    if len(gate.heard) != 1 or len(gate.heard[0]) != index.numel():
        return None
    rows, flat = gate.heard[0], index.reshape(-1)
    place = torch.arange(len(flat), device=flat.device)
    # batched_mm keeps the slots in their order, grouped_mm sorts them by expert with this very call.
    if experts_backend(module.config) != "batched_mm":
        place[torch.sort(flat).indices] = torch.arange(len(flat), device=flat.device)
    # Another version of transformers may order them otherwise: the first and the last token tell.
    wrong = []
    for token in (0, len(hidden) - 1):
        slot = token * index.shape[1]
        expert = int(flat[slot])
        if expert < getattr(module, experts.up).shape[0]:
            expected = _intermediate_states(module, gate, experts, expert, hidden[token : token + 1])[0].float()
            wrong.append((rows[int(place[slot])].float() - expected).norm() > 0.1 * expected.norm())
    if any(numbers_of(wrong)):
        return None
    place = place.to(rows.device, non_blocking=True)
    return lambda slots: rows.index_select(0, place[slots])


def _intermediate_states(module: Any, gate: _RecordedGate, experts: ExpertsLayout, expert: int, x: Tensor) -> Tensor:
    """What the down projection of one expert multiplies: (tokens, intermediate)."""
    weight = read_parameter(module, experts.up)[expert]
    bias = read_parameter(module, experts.up_bias)[expert] if experts.up_bias else None
    return gate.gate(F.linear(x, weight.t() if experts.layout.endswith("columns") else weight, bias))
