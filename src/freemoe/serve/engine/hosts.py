"""What the engine can answer with: a base with its experts, a plain model, or another artefact that answers in named ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from freemoe.core.errors import DataError
from freemoe.core.registry import unknown_name
from freemoe.core.threads import model_lock_of
from freemoe.evals.engine.answering import BASE, Answering


class VariantHost:
    """A converted, trimmed or plain model as a host: its ways are its experts; ``base`` is the model as it is."""

    router = None

    def __init__(self, opened: Answering) -> None:
        self.model, self.tokenizer = opened.model, opened.tokenizer
        self._ways = opened.ways
        self._inside = ExitStack()

    @property
    def experts(self) -> list[str]:
        """Names of the ways, the base left out."""
        return [name for name in self._ways if name != BASE]

    def require(self, name: str) -> None:
        """Raise unless there is such a way."""
        if name != BASE and name not in self._ways:
            raise unknown_name("expert", name, [BASE, *self.experts])

    @contextmanager
    def expert(self, name: str) -> Iterator[None]:
        """Let the model answer in a way inside a ``with`` block."""
        with model_lock_of(self.model).hold_lock():
            try:
                self.set_expert(name)
                yield
            finally:
                self._inside.close()

    def set_expert(self, name: str) -> None:
        """Change to another way inside of the block."""
        self.require(name)
        self._inside.close()
        if name in self._ways:
            self._inside.enter_context(self._ways[name]())

    def load_expert(self, artefact: Any, name: str | None = None, *, prefix: str = "") -> list[str]:
        """There is nothing to put experts on."""
        raise DataError(
            "This server runs a model without a base for experts; serve a base, or an artefact of domain experts."
        )

    def delete_expert(self, name: str) -> None:
        """A way is part of the model."""
        raise DataError(f"{name!r} is a way to run this model, and cannot be unloaded.")
