"""A base and the experts on it: which there are, which is switched in, and how others come and go."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import ArtifactError, DataError
from freemoe.core.registry import unknown_name
from freemoe.core.threads import Threads, model_lock_of, require_threads
from freemoe.domain_experts.expert import DomainExpert, read_experts
from freemoe.domain_experts.hosting.combining import combine_experts, combined_mask
from freemoe.domain_experts.hosting.protection import refuse_copy, require_same_values
from freemoe.domain_experts.hosting.standing import StackHost, expert_stack_of
from freemoe.domain_experts.hosting.summary import as_table, expert_row, read_measurements
from freemoe.domain_experts.result import KIND
from freemoe.hub.fetch import fetch_artefact
from freemoe.models.checkpoints.identity import require_base
from freemoe.models.hooks import combined_hooks, replace_method
from freemoe.models.mask import Mask
from freemoe.models.mixed.board import MixedBoard, Tiles
from freemoe.models.mixed.running import MixedBatch, Strategy, open_mixed_batch
from freemoe.models.switchboard import ExpertCache
from freemoe.models.weights import WeightMatrix, find_weights
from freemoe.recipes.expert_names import AUTO, BASE, ExpertRef, Operation, require_new_names

Call = TypeVar("Call", bound=Callable[..., Any])


def with_model_lock(call: Call) -> Call:
    """Let a host's method have the base for itself while it runs."""

    @functools.wraps(call)
    def locked_call(self: ExpertHost, *args: Any, **kwargs: Any) -> Any:
        with self.turn():
            return call(self, *args, **kwargs)

    return cast("Call", locked_call)


class ExpertHost(torch.nn.Module, StackHost):
    """A base model with its experts, one of them or none switched in.

    Wherever a name is expected, ``a+b`` is the union of two experts (what is off in either) and ``a&b`` their intersection.

    Args:
        model: The base, a transformers model.
        experts: Those that are there from the start.
        tokenizer: The base's, or None.
        threads: What a thread does that finds the base in use by another: ``wait`` for its turn, or ``raise`` a `BusyError`.

    Raises:
        RecipeError: ``threads`` is neither.
    """

    def __init__(
        self, model: Any, experts: Sequence[DomainExpert], tokenizer: Any = None, threads: Threads = "wait"
    ) -> None:
        super().__init__()
        self.threads: Threads = require_threads(threads)
        self.model = model
        self.tokenizer = tokenizer
        self.training = model.training
        require_new_names([e.name for e in experts], ())
        self._experts = {e.name: e for e in experts}
        # What builds say of their experts, by name.
        self._measurements: dict[str, dict[str, Any]] = {}
        self._on_board()

    def _on_board(self) -> None:
        """Begin anew with the base's weights, where they are now; the base must be switched in."""
        self._weights = find_weights(self.model)
        self._board = ExpertCache(self._weights)
        self._mixed_board = MixedBoard(self._weights)

    @property
    def experts(self) -> list[str]:
        """Names of the experts, those in `rejected` included."""
        return list(self._experts)

    @property
    def rejected(self) -> list[str]:
        """The experts that the guard rejected: they switch nothing off, so that they are the base."""
        return [name for name, expert in self._experts.items() if expert.kind == BASE]

    @property
    def active(self) -> str:
        """The expert that is switched in now, or ``"base"``."""
        return expert_stack_of(self.model).name_of(self)

    @property
    def active_expert(self) -> str:
        """The same as `active`, as PEFT would call it."""
        return self.active

    def require(self, name: str) -> None:
        """Raise unless ``name`` can be switched in.

        Raises:
            DataError: It is ``"auto"``, which depends on a prompt.
            UnknownNameError: It is no expert here, or combines what is none.
        """
        if name == AUTO:
            raise DataError("'auto' depends on the prompt and cannot be set; pass expert='auto' with the prompt.")
        if name != BASE:
            ExpertRef.parse(name).require_known(self._experts, (BASE, AUTO))

    def expert_mask(self, name: str) -> Mask:
        """Weights that an expert switches off, regenerated from the untouched base."""
        with self.expert(BASE):
            self.require(name)
            return self._build_mask(name)

    def expert_tiles(self, name: str) -> Tiles | None:
        """The bands of an expert that is nothing else, for kernels that make masks of them; None for any other."""
        return self._experts[name].band_tiles(self._weights) if name in self._experts else None

    def _build_mask(self, name: str) -> Mask:
        """The same while the base is switched in."""
        if name == BASE:
            return Mask()
        ref = ExpertRef.parse(name)
        return combined_mask(ref.operation, [self._experts[part].mask(self._weights) for part in ref.names])

    def described(self, name: str) -> DomainExpert:
        """An expert, or a combination as an expert of its own.

        Raises:
            UnknownNameError: As `require`.
            DataError: The combination is the base.
        """
        with self.expert(BASE):
            self.require(name)
            ref = ExpertRef.parse(name)
            if ref.operation is None:
                return self._experts.get(name, DomainExpert(BASE))
            return combine_experts(name, ref.operation, [self._experts[part] for part in ref.names], self._weights)

    def turn(self) -> contextlib.AbstractContextManager[object]:
        """Have the base for this thread alone inside a ``with`` block, as every call here does for itself; it nests.

        Raises:
            BusyError: Another thread has it and ``threads`` is ``raise``; or waiting would never end.
        """
        return model_lock_of(self.model).hold_lock(self.threads)

    def set_expert(self, name: str | None) -> None:
        """Switch to an expert until told otherwise; None or ``"base"`` restores the base bit by bit.

        That holds for all threads, for calls that name no expert.
        """
        with self.turn():
            self.require(name or BASE)
            expert_stack_of(self.model).set_expert(self, name or BASE)

    @contextlib.contextmanager
    def expert(self, name: str | None) -> Iterator[Self]:
        """Use an expert inside a ``with`` block, then go back to the one before; other threads wait until the block ends."""
        with self.turn():
            self.require(name or BASE)
            block = expert_stack_of(self.model).push_block(self, name or BASE)
            try:
                yield self
            finally:
                expert_stack_of(self.model).remove_block(block)

    def switch_in(self, name: str) -> None:
        """Put an expert into the weights; `set_expert` and `expert` ask for it."""
        if name not in self._board:
            # Bands are rankings of the base's own values.
            self._board.activate_expert(None)
            self._board.add_expert(name, self._build_mask(name))
        self._board.activate_expert(name)

    def base_restorer(self) -> Callable[[], None]:
        """What makes the weights the base's again."""
        return functools.partial(self._board.activate_expert, None)

    def guard_base(self) -> contextlib.AbstractContextManager[None]:
        """Refuse copies of the base while an expert is in its weights: they would be neither the base nor said to be an expert."""
        return combined_hooks(
            *(replace_method(self.model, refuse_copy, name) for name in ("save_pretrained", "__reduce_ex__"))
        )

    def disable_expert(self) -> contextlib.AbstractContextManager[Self]:
        """Use the base inside a ``with`` block, then go back to the expert before."""
        return self.expert(BASE)

    @contextlib.contextmanager
    def mixed(self, strategy: Strategy = "auto") -> Iterator[MixedBatch]:
        """Let the sequences of one batch act under experts of their own, in one forward pass of ``self.model``.

        What the block yields says by ``assign(names)`` which sequence is whose; nothing is switched in place. The block has the
        base for this thread, gradients are off, and a block or an expert that is opened inside it rules until it ends.

        Args:
            strategy: ``fused``, ``scratch`` or ``auto``; see `models.mixed.running.MixedBatch`.

        Raises:
            RecipeError: Another strategy.
            DataError: The base has weights that are not in memory.
        """
        with self.expert(BASE):
            standing = expert_stack_of(self.model)
            block = standing.push_block(self, BASE)
            try:
                with open_mixed_batch(
                    self._mixed_board,
                    mask_of=self.expert_mask,
                    tiles_of=self.expert_tiles,
                    strategy=strategy,
                    rules=functools.partial(standing.is_top, block),
                ) as run:
                    yield run
            finally:
                standing.remove_block(block)

    def mixable(self) -> list[WeightMatrix]:
        """The weights that a mixed batch could have off."""
        return [weight for weight in self._mixed_board.weights.values() if not weight.is_fused]

    def mixed_bytes(self, name: str) -> int:
        """Memory that mixed batches hold for an expert, in bytes; 0 before its first use."""
        return self._mixed_board.held_bytes(name)

    def load_expert(self, artefact: str | Path, name: str | None = None, *, prefix: str = "") -> list[str]:
        """Add the experts of a further artefact of this very base; its router is not taken over.

        Args:
            artefact: Folder written by ``freemoe build``, or a repository ``owner/name`` of the hub.
            name: Which of its experts; all of them if absent.
            prefix: Put before their names here.

        Returns:
            The names under which they can be used.

        Raises:
            ArtifactError: The artefact is damaged, holds something else, or was made for another base.
            UnknownNameError: It has no expert of that name.
            DataError: A name is taken already or cannot be one, or there are too many (`recipes.expert_names`).
        """
        root = fetch_artefact(artefact, required=True)
        manifest = read_manifest(root)
        if manifest.get("kind") != KIND:
            raise ArtifactError(f"{str(artefact)!r} holds {manifest.get('kind')!r}, not domain experts.")
        held = {expert.name: expert for expert in read_experts(root, manifest)}
        if name is not None and name not in held:
            raise unknown_name("expert", name, list(held))
        wanted = list(held) if name is None else [name]
        with self.expert(BASE):
            require_new_names([prefix + n for n in wanted], self._experts)
            require_base(manifest, self.model, self.tokenizer)
            measurements = read_measurements(root)
            for old in wanted:
                self._experts[prefix + old] = replace(held[old], name=prefix + old)
                self._measurements[prefix + old] = measurements.get(old, {})
        return [prefix + n for n in wanted]

    def add_expert(
        self, name: str, *, union: Sequence[str] | None = None, intersection: Sequence[str] | None = None
    ) -> None:
        """Add an expert that combines others: it can be switched in, written and asked like any.

        Nothing is known of what it gains: score it on held-out documents of both domains (``freemoe eval OUT -e a+b``).

        Args:
            name: Of the new expert.
            union: Experts; what is off in any of them is off.
            intersection: Experts; what is off in all of them is off.

        Raises:
            DataError: As `load_expert` of the name; neither or both are given, or the combination is the base.
            UnknownNameError: One of them is no expert here.
        """
        if (union is None) == (intersection is None):
            raise DataError("An expert combines others by union=[...] or by intersection=[...]: give one of the two.")
        parts = intersection if union is None else union
        operation: Operation = "intersection" if union is None else "union"
        assert parts is not None
        with self.expert(BASE):
            require_new_names([name], self._experts)
            ref = ExpertRef(tuple(parts), operation)
            ref.require_known(self._experts)
            self._experts[name] = combine_experts(name, operation, [self._experts[p] for p in parts], self._weights)
            self._measurements[name] = {"verdict": f"{ref}: measured by nobody yet"}
            self._board.remove_expert(name)
            self._mixed_board.remove_expert(name)

    def delete_expert(self, name: str) -> None:
        """Let go of an expert; where it is switched in, the base is from now on. The router's way to it leads to the base.

        Raises:
            UnknownNameError: There is no such expert.
        """
        with self.expert(BASE):
            if name not in self._experts:
                raise unknown_name("expert", name, self.experts)

            def uses_deleted(other: str) -> bool:
                # Combinations with it are forgotten too.
                return name in ExpertRef.parse(other).names

            expert_stack_of(self.model).drop_experts(self, uses_deleted)
            for board in (self._board, self._mixed_board):
                for other in filter(uses_deleted, board.expert_names):
                    board.remove_expert(other)
            del self._experts[name]
            self._measurements.pop(name, None)

    def expert_summary(self) -> list[dict[str, Any]]:
        """What there is to say of every expert; see `hosting.summary.expert_row` for the keys."""
        with self.expert(BASE):
            return [
                expert_row(expert, self._build_mask(name), self._weights, self._measurements.get(name))
                for name, expert in self._experts.items()
            ]

    def print_expert_summary(self) -> None:
        """Print `expert_summary` as a table; a star marks the expert that is switched in."""
        print(as_table(self.expert_summary(), self.active))

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As of any module; the base's values are loaded, whatever expert is switched in."""
        with self.expert(BASE):
            found = super().load_state_dict(state_dict, strict, assign)
            self._on_board()
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the base (``to``, ``half``, ``cuda``), whatever expert is switched in."""
        require_same_values(self.model, fn)
        with self.expert(BASE):
            super()._apply(fn, recurse)
            self._on_board()
        return self
