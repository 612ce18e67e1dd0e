"""How rows of different experts share forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from freemoe.core.errors import DataError
from freemoe.models.mixed.cost import worth_mixing
from freemoe.models.mixed.rows import rows_by_key

_PATIENCE = 16
"""Passes of one expert alone after which it is switched in, where several shared the passes before."""


class ByExpert:
    """How rows of different experts share forward passes: one pass per expert, which stays switched in until another is needed.

    The host has ``expert(name)``, a context manager, and ``set_expert(name)`` to change to another inside of it.
    """

    def __init__(self, host: Any) -> None:
        self._host = host
        self._block, self._name = ExitStack(), ""

    def group_rows(self, names: Sequence[str], tokens: int) -> list[list[int]]:
        """Which rows go together; first those of the expert that is switched in.

        ``tokens`` are those of all rows, padding too.
        """
        found = rows_by_key(names)
        return [found[name] for name in sorted(found, key=lambda n: (n != self._name, n))]

    def activate_experts(self, names: Sequence[str]) -> None:
        """Let the next pass, of the rows of one part, act under their experts."""
        name = names[0]
        if not self._name:
            self._block.enter_context(self._host.expert(name))
        elif name != self._name:
            self._host.set_expert(name)
        self._name = name

    def release_model(self) -> None:
        """Leave the base as it was, for others to use."""
        self._name = ""
        self._block.close()


class InOnePass(ByExpert):
    """Rows of several experts in one pass, where that is quicker and the experts allow it; else one pass per expert."""

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._mixed = None
        # Passes since the last one of several experts; whether the next pass is one of all rows together.
        self._since, self._together = 0, False
        self._worth: dict[int, bool] = {}
        self._alone: set[frozenset[str]] = set()

    def group_rows(self, names: Sequence[str], tokens: int) -> list[list[int]]:
        """All rows, or those of each expert."""
        together = frozenset(names)
        self._since = self._since + 1 if len(together) == 1 else 0
        mixing = len(together) > 1 or (self._mixed is not None and self._since < _PATIENCE)
        if mixing and together not in self._alone and self._is_worth(tokens):
            try:
                self._assign_rows(names)
            except DataError:
                # Fused experts of a mixture, weights on disk: they can only be switched.
                self._alone.add(together)
            else:
                self._together = True
                return [list(range(len(names)))]
        self._together = False
        return super().group_rows(names, tokens)

    def _is_worth(self, tokens: int) -> bool:
        if tokens not in self._worth:
            if len(self._worth) > 4096:
                self._worth.clear()
            self._worth[tokens] = worth_mixing(self._host.mixable(), tokens)
        return self._worth[tokens]

    def _assign_rows(self, names: Sequence[str]) -> None:
        if self._mixed is None:
            super().release_model()
            self._mixed = self._block.enter_context(self._host.mixed())
        if self._mixed.assigned_experts != tuple(names):
            self._mixed.assign(names)

    def activate_experts(self, names: Sequence[str]) -> None:
        """Act as `group_rows` has assigned, or as the one expert of the rows."""
        if not self._together:
            if self._mixed is not None:
                self._leave_mixed()
            super().activate_experts(names)

    def _leave_mixed(self) -> None:
        self._mixed = None
        super().release_model()

    def release_model(self) -> None:
        """Leave the base as it was."""
        self._leave_mixed()
        # Experts may be others when it goes on.
        self._alone.clear()
