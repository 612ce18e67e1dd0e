"""A model's output head on some rows at a time: a vocabulary of logits for every token never fits at once.

The decoder runs as ever; what it hands to the head is kept, and the head with all that a family does behind it (soft
caps, scales, biases) is run on a few rows when asked.

Shapes: B rows of a batch, L its longest, N wanted places, n rows at a time, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.compat.transformers import unwrap_peft
from freemoe.models.hooks import (
    combined_hooks,
    forward_hook,
    forward_pre_hook,
    has_hooks,
    has_hooks_after,
    hooks_disabled,
    replace_method,
)

CHUNK = 1 << 24  # Logits alive at one time, about: 64 MiB in fp32


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """The end of a model's forward pass, held back."""

    hidden: Tensor  # ``(N, H)``: what the head is given at the wanted places, part of autograd's graph
    logits: Callable[[Tensor], Tensor]  # Makes ``(n, V)`` of rows ``(n, H)`` by the model's own forward
    # The head, where it is proven that logits are its weight times the hidden state plus its bias and nothing else;
    # None where it is not
    plain: nn.Linear | None
    parameters: tuple[nn.Parameter, ...]  # Parameters of this end that ask for gradients
    vocabulary: int  # V

    @property
    def rows_per_chunk(self) -> int:
        """How many rows of logits make a chunk."""
        return max(1, CHUNK // self.vocabulary)


@dataclass(eq=False)
class _HeadCapture:
    """What a forward pass showed of its head."""

    hidden: Tensor | None = None
    output: Tensor | None = None
    decoded: dict[nn.Module, Any] = field(default_factory=dict)
    calls: int = 0


def forward_to_head(model: Any, wanted: Tensor, **inputs: Any) -> DeferredLogits:
    """Run a model up to its output head, and keep the places ``wanted`` ``(N,)`` of the input's ``B L``.

    A model that has no head, or none that is called once as a module behind a decoder, makes all its logits at once:
    these are then the hidden state, and the end does nothing more.
    """
    causal = unwrap_peft(model)
    head = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    # What may stand before the head, the outermost first; some families call an inner one only.
    inner = causal.get_decoder() if hasattr(causal, "get_decoder") else None
    decoders = [m for m in (getattr(causal, "base_model", None), inner) if isinstance(m, nn.Module) and m is not causal]
    if head is None or not decoders:
        return _all_at_once(model, wanted, inputs)
    seen = _HeadCapture()

    def hold_back(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.calls += 1
        seen.hidden = args[0].reshape(-1, args[0].shape[-1])[wanted]
        return (args[0].new_empty(1, 0, args[0].shape[-1]), *args[1:])

    def see_output(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.output = output

    def see_decoder(module: nn.Module, args: Any, output: Any) -> None:
        seen.decoded[module] = output

    # A plain linear layer whose forward nobody has changed.
    untouched = type(head) is nn.Linear and "forward" not in head.__dict__ and not has_hooks(head)
    with combined_hooks(
        forward_pre_hook(head, hold_back),
        forward_hook(head, see_output),
        *(forward_hook(m, see_decoder) for m in decoders),
    ):
        result = model(**inputs).logits
    decoder = next((module for module in decoders if module in seen.decoded), None)
    if seen.calls != 1 or seen.hidden is None or decoder is None:
        return _all_at_once(model, wanted, inputs)
    decoded = seen.decoded[decoder]
    # The logits are the head's very output: one object, and nothing was done to it in place.
    bare = result is seen.output and not result.is_inference() and result._version == 0
    plain = head if untouched and bare else None
    inside = {id(p) for p in decoder.parameters()} - {id(p) for p in head.parameters()}
    return DeferredLogits(
        seen.hidden,
        plain or (lambda rows: _head_logits(causal, decoder, decoded, head, rows, inputs)),
        plain,
        tuple(p for p in causal.parameters() if p.requires_grad and id(p) not in inside),
        result.shape[-1],
    )


def _all_at_once(model: Any, wanted: Tensor, inputs: dict[str, Any]) -> DeferredLogits:
    logits = model(**inputs).logits.flatten(0, 1)[wanted]
    return DeferredLogits(logits, lambda rows: rows, None, (), logits.shape[-1])


def _head_logits(causal: Any, decoder: nn.Module, decoded: Any, head: nn.Module, rows: Tensor, inputs: Any) -> Tensor:
    """Logits ``(n, V)`` of the head's inputs ``rows``, by the model's own forward, its decoder left out."""
    # Hooks in front of the model were told of this run already; hooks behind it may change its logits.
    run = causal if has_hooks_after(causal) else causal.forward
    with output_replayed(decoder, decoded), forward_pre_hook(head, lambda module, args: (rows[None], *args[1:])):
        return run(**inputs).logits[0]


@contextlib.contextmanager
def output_replayed(decoder: nn.Module, output: Any) -> Iterator[None]:
    """Inside, a module returns what it returned before; its hooks are not called again for a run that was one."""
    with hooks_disabled(decoder), replace_method(decoder, lambda *args, **kwargs: output):
        yield


def summed_loss(ending: DeferredLogits, targets: Tensor) -> Tensor:
    """Sum of cross-entropies in nats, fp32, a scalar; its gradient is made along with it, chunk by chunk.

    So the backward pass computes no logits again, and none are kept for it.

    ``targets``: ``(N,)`` token to be predicted at each of its rows.
    """
    wanted = ending.hidden.requires_grad or bool(ending.parameters)
    if torch.is_grad_enabled() and wanted:
        loss: Any = _SummedLoss.apply(ending, targets, ending.hidden, *ending.parameters)
        return loss
    total = torch.zeros((), device=ending.hidden.device)
    with torch.no_grad():
        for rows, tokens in _split_chunks(ending, targets):
            logits = ending.logits(rows).float()
            total += nn.functional.cross_entropy(logits, tokens, reduction="sum")
    return total


def _split_chunks(ending: DeferredLogits, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    hidden = ending.hidden.detach()
    return zip(hidden.split(ending.rows_per_chunk), targets.split(ending.rows_per_chunk), strict=True)


class _SummedLoss(torch.autograd.Function):
    """The loss of `summed_loss` with its gradients by the hidden state and by the end's parameters."""

    @staticmethod
    def forward(ctx: Any, ending: DeferredLogits, targets: Tensor, hidden: Tensor, *parameters: Tensor) -> Tensor:
        if ending.plain is not None and not parameters:
            loss, gradients = _plain_gradients(ending, ending.plain, targets)
        else:
            loss, gradients = _any_gradients(ending, targets, parameters)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> Any:
        return None, None, *(g * up for g in ctx.saved_tensors)


def _plain_gradients(ending: DeferredLogits, head: nn.Linear, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Loss and its gradient by the hidden state, by hand: softmax minus one-hot, times the head's weight.

    One chunk of logits is all that is ever held.
    """
    total = torch.zeros((), device=targets.device)
    gradient = torch.empty_like(ending.hidden)
    kind = head.weight.dtype
    if torch.is_autocast_enabled(head.weight.device.type) and kind != torch.float64:
        kind = torch.get_autocast_dtype(head.weight.device.type)
    # Autocast would make this copy anew for every chunk.
    weight = head.weight.detach().to(kind)
    bias = None if head.bias is None else head.bias.detach().to(kind)
    with torch.autocast(head.weight.device.type, enabled=False):
        for (rows, tokens), into in zip(
            _split_chunks(ending, targets), gradient.split(ending.rows_per_chunk), strict=True
        ):
            logits = nn.functional.linear(rows.to(kind), weight, bias).float()
            logits -= logits.amax(-1, keepdim=True)
            right = logits.gather(-1, tokens[:, None])
            sums = logits.exp_().sum(-1, keepdim=True)
            total += (sums.log() - right).sum()
            logits /= sums
            logits.scatter_add_(-1, tokens[:, None], torch.full_like(right, -1))
            into.copy_(logits.to(kind) @ weight)
    return total, [gradient]


def _any_gradients(
    ending: DeferredLogits, targets: Tensor, parameters: tuple[Tensor, ...]
) -> tuple[Tensor, list[Tensor]]:
    """The same by autograd through the model's own end, whatever that does."""
    total = torch.zeros((), device=targets.device)
    sums = [torch.zeros_like(p) for p in parameters]
    gradient = torch.empty_like(ending.hidden)
    for (rows, tokens), into in zip(_split_chunks(ending, targets), gradient.split(ending.rows_per_chunk), strict=True):
        with torch.enable_grad():
            rows.requires_grad_(True)
            loss = nn.functional.cross_entropy(ending.logits(rows).float(), tokens, reduction="sum")
            found = torch.autograd.grad(loss, [rows, *parameters], allow_unused=True)
        total += loss.detach()
        if found[0] is not None:
            into.copy_(found[0])
        for mine, more in zip(sums, found[1:], strict=True):
            if more is not None:
                mine += more
    return total, [gradient, *sums]
