"""The experts that mixed batches use: learned at their first use, the one that was not used for longest forgotten first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freemoe.core.errors import DataError
from freemoe.kernels.sparse import bands
from freemoe.models.mask import Mask
from freemoe.models.mixed.parts import WeightMask
from freemoe.models.switchboard import RecentExperts
from freemoe.models.weights import WeightMatrix

Parts = dict[str, WeightMask]
"""Weight -> what is off of it; weights that an expert leaves alone are absent."""

Tiles = Mapping[str, bands.BandTile]
"""Weight -> the band of it that is off, where an expert is nothing but such bands."""


class MixedBoard(RecentExperts[Parts]):
    """What experts of one base have off, by weight; the model is never touched.

    All experts together may take ``most_bytes`` (see `RecentExperts`); those of the current batch are never forgotten.
    """

    def __init__(self, weights: Sequence[WeightMatrix], most_bytes: int | None = None) -> None:
        super().__init__(weights, most_bytes)
        self.weights = {w.name: w for w in weights}
        # Buffers for masked copies of weights, by device and type.
        self.scratch: dict[Any, Any] = {}

    def held_bytes(self, name: str) -> int:
        """Memory that is held for an expert, in bytes; 0 for one that was not used yet."""
        return sum(part.num_bytes for part in self._experts.get(name, {}).values())

    def holds_experts(self, experts: Mapping[str, Parts]) -> bool:
        """Whether all of these are still held as they are."""
        return all(self._experts.get(name) is parts for name, parts in experts.items())

    def remove_expert(self, name: str) -> None:
        """Let go of an expert, so that it is learned anew when it is used next."""
        self._experts.pop(name, None)

    def require_mixable(self) -> None:
        """Raise unless batches of this base can be mixed at all.

        Raises:
            DataError: Some weights are read from elsewhere as they are needed.
        """
        away = [w.name for w in self.weights.values() if w.stored is not None]
        if away:
            raise DataError(
                f"{len(away)} weights are not in memory (the first is {away[0]!r}), and one forward pass of several experts reads "
                "them where they are. Use strategy='grouped', or load the base with --device auto or cpu."
            )

    def get_experts(
        self,
        names: Sequence[str],
        mask_of: Callable[[str], Mask],
        tiles_of: Callable[[str], Tiles | None] = lambda name: None,
    ) -> dict[str, Parts]:
        """What the experts of a batch have off.

        The base must be untouched. ``tiles_of`` gives the bands of one that is nothing else, asked first where a kernel
        makes masks of bands.

        Raises:
            DataError: An expert has fused experts of a mixture off, whose tokens come in another order.
        """
        found = {}
        for name in names:
            parts = self._experts.pop(name, None)
            if parts is None:
                parts = self._in_tiles(name, tiles_of) or self._from_mask(name, mask_of(name))
            self._experts[name] = found[name] = parts
        self._make_room({name: self.held_bytes(name) for name in self._experts}, found)
        return found

    def _in_tiles(self, name: str, tiles_of: Callable[[str], Tiles | None]) -> Parts | None:
        if not all(weight.is_fused or bands.tiles_available(weight.parameter) for weight in self.weights.values()):
            return None
        tiles = tiles_of(name)
        if not tiles or any(self.weights[key].layout != "rows" for key in tiles):
            return None
        return {key: WeightMask.of_tile(tile, self.weights[key]) for key, tile in tiles.items()}

    def _from_mask(self, name: str, mask: Mask) -> Parts:
        fused = [key for key in mask if self.weights[key].is_fused]
        if fused:
            raise DataError(
                f"Expert {name!r} has weights of a mixture's own experts off (the first are {fused[0]!r}); their tokens come in "
                "another order, so that it cannot share a forward pass with others. Use strategy='grouped'."
            )
        return {key: WeightMask.from_mask(own, self.weights[key]) for key, own in mask.items()}
