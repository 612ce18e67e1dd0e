"""Several experts in one forward pass: who has the base meanwhile, and which experts the passes know."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from freemoe.domain_experts.hosting.standing import StackHost, expert_stack_of
from freemoe.evals.engine.answering import BASE
from freemoe.models.mask import Mask
from freemoe.models.mixed.board import MixedBoard, Tiles
from freemoe.models.mixed.running import MixedBatch, Strategy, open_mixed_batch
from freemoe.models.weights import WeightMatrix


class MixingHost(StackHost):
    """A host whose batches may hold sequences of several experts."""

    model: Any  # The base
    _mixed_board: MixedBoard

    def expert(self, name: str | None) -> AbstractContextManager[Any]:
        """Use an expert inside a ``with`` block."""
        raise NotImplementedError

    def expert_mask(self, name: str) -> Mask:
        """Weights that an expert switches off."""
        raise NotImplementedError

    def expert_tiles(self, name: str) -> Tiles | None:
        """The bands of an expert that is nothing else."""
        raise NotImplementedError

    @contextmanager
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
