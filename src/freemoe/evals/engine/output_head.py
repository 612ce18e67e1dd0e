"""A model's output head on some rows at a time: a vocabulary of logits for every token never fits at once.

The decoder runs as ever; what it hands to the head is kept, and the head with all that a family does behind it (soft
caps, scales, biases) is run on a few rows when asked.

Shapes: B rows of a batch, L its longest, N wanted places, n rows at a time, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
from freemoe.text.blocks import PackedBlocks

Step = Callable[[Tensor, slice], tuple[Tensor, Sequence[Tensor | None]]]
"""Of some rows, and of where they stand: their part of a sum, and its gradients by the rows and by the end's parameters."""

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

    @property
    def is_learned(self) -> bool:
        """Whether what is made of the logits shall have a gradient."""
        return torch.is_grad_enabled() and (self.hidden.requires_grad or bool(self.parameters))

    def iter_chunks(self) -> Iterator[tuple[Tensor, slice]]:
        """The hidden states ``(n, H)``, as many at a time as make a chunk of logits and without a graph; where they stand."""
        for start in range(0, len(self.hidden), self.rows_per_chunk):
            at = slice(start, start + self.rows_per_chunk)
            yield self.hidden[at].detach(), at


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
        seen.hidden = args[0].reshape(-1, args[0].shape[-1])[wanted.to(args[0].device)]
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
    logits = model(**inputs).logits.flatten(0, 1)
    logits = logits[wanted.to(logits.device)]
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


def forward_blocks_to_head(
    model: Any, batch: PackedBlocks, wanted: Tensor | None = None, **inputs: Any
) -> DeferredLogits:
    """`forward_to_head` of packed blocks, at all places but each row's last if none are named; ``inputs`` stand for their ids."""
    if wanted is None:
        wanted = torch.arange(batch.ids.numel(), device=model.device).view_as(batch.ids)[:, :-1].flatten()
    return forward_to_head(model, wanted, **_block_inputs(model, batch, inputs))


def forward_blocks(model: Any, batch: PackedBlocks, **inputs: Any) -> Tensor:
    """(rows, length, H): what packed blocks give the head, which does not run; ``inputs`` stand for their ids."""
    return model.base_model(**_block_inputs(model, batch, inputs)).last_hidden_state


def _block_inputs(model: Any, batch: PackedBlocks, inputs: dict[str, Any]) -> dict[str, Any]:
    given = inputs or {"input_ids": batch.ids.to(model.device, non_blocking=True)}
    return {**given, "position_ids": batch.positions.to(model.device, non_blocking=True), "use_cache": False}


def summed_loss(ending: DeferredLogits, targets: Tensor) -> Tensor:
    """Sum of cross-entropies in nats by `summed_in_chunks`; of a plain head the gradient is made by hand.

    ``targets``: ``(N,)`` token to be predicted at each of its rows.
    """
    if ending.plain is not None and not ending.parameters and ending.is_learned:
        loss: Any = _InChunks.apply(_plain_step(ending.plain, targets), ending, ending.hidden)
        return loss

    def chunk_loss(rows: Tensor, at: slice) -> Tensor:
        logits = ending.logits(rows).float()
        return F.cross_entropy(logits, targets[at].to(logits.device), reduction="sum")

    return summed_in_chunks(ending, chunk_loss)


def distillation_loss(student: DeferredLogits, teacher: DeferredLogits) -> Tensor:
    """KL(teacher || student) of the next-token distributions in nats, fp32, its mean over the places; zero where there is none."""

    def chunk_kl(rows: Tensor, at: slice) -> Tensor:
        with torch.no_grad():
            wanted = torch.log_softmax(teacher.logits(teacher.hidden[at]).float(), dim=-1)
        found = torch.log_softmax(student.logits(rows).float(), dim=-1)
        return wanted.exp().flatten() @ (wanted - found).flatten()

    return summed_in_chunks(student, chunk_kl) / max(1, len(student.hidden))


def summed_in_chunks(ending: DeferredLogits, part: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """A sum over the wanted places, fp32, a scalar; its gradient is made along with it, chunk by chunk.

    So the backward pass computes no logits again, and none are kept for it.

    ``part`` makes of some rows ``(n, H)``, and of where they stand, their sum.
    """

    def step(rows: Tensor, at: slice) -> tuple[Tensor, Sequence[Tensor | None]]:
        with torch.enable_grad():
            loss = part(rows.requires_grad_(), at)
        return loss.detach(), torch.autograd.grad(loss, [rows, *ending.parameters], allow_unused=True)

    if ending.is_learned:
        loss: Any = _InChunks.apply(step, ending, ending.hidden, *ending.parameters)
        return loss
    with torch.no_grad():
        sums = [part(rows, at) for rows, at in ending.iter_chunks()]
    return sum(sums, torch.zeros((), device=ending.hidden.device))


class _InChunks(torch.autograd.Function):
    """A sum with its gradients by the hidden state and by the end's parameters; a step gives both of its rows."""

    @staticmethod
    def forward(ctx: Any, step: Step, ending: DeferredLogits, hidden: Tensor, *parameters: Tensor) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        gradient, *sums = (torch.zeros_like(t) for t in (hidden, *parameters))
        for rows, at in ending.iter_chunks():
            loss, (found, *more) = step(rows, at)
            total += loss
            if found is not None:
                gradient[at] = found
            for mine, other in zip(sums, more, strict=True):
                if other is not None:
                    mine += other
        ctx.save_for_backward(gradient, *sums)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> Any:
        return None, None, *(g * up for g in ctx.saved_tensors)


def _plain_step(head: nn.Linear, targets: Tensor) -> Step:
    """Loss and its gradient by the hidden state, by hand: softmax minus one-hot, times the head's weight.

    One chunk of logits is all that is ever held.
    """
    device, kind = head.weight.device.type, head.weight.dtype
    if torch.is_autocast_enabled(device) and kind != torch.float64:
        kind = torch.get_autocast_dtype(device)
    # Autocast would make this copy anew for every chunk.
    weight = head.weight.detach().to(kind)
    bias = None if head.bias is None else head.bias.detach().to(kind)

    def step(rows: Tensor, at: slice) -> tuple[Tensor, Sequence[Tensor | None]]:
        tokens = targets[at, None].to(rows.device)
        with torch.autocast(device, enabled=False):
            logits = F.linear(rows.to(kind), weight, bias).float()
            logits -= logits.amax(-1, keepdim=True)
            right = logits.gather(-1, tokens)
            sums = logits.exp_().sum(-1, keepdim=True)
            loss = (sums.log() - right).sum()
            logits /= sums
            logits.scatter_add_(-1, tokens, torch.full_like(right, -1))
            return loss, [logits.to(kind) @ weight]

    return step
