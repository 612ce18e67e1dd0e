"""A model that continues a text: what every opened artefact can do, whatever it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from freemoe.core.errors import DataError
from freemoe.core.registry import unknown_name
from freemoe.evals.engine.scorer import context_length
from freemoe.hub.shipped import Shipped

BASE, AUTO = "base", "auto"
"""The names of the base itself, and of what the artefact picks."""


class Opened(Protocol):
    """What `freemoe.load` returns."""

    @property
    def model(self) -> Any:
        """The transformers model that runs."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, or None."""
        ...

    def generate_text(
        self, prompt: str, *, expert: str = AUTO, max_new_tokens: int = 64, **options: Any
    ) -> tuple[str, str]:
        """Continue a prompt; returns the continuation and the name of what wrote it."""
        ...

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Copy the artefact."""
        ...

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        overwrite: bool = False,
    ) -> dict[str, Any]:
        """Write the artefact to a repository of the hub."""
        ...


def prompt_ids(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> Tensor:
    """A prompt's token ids ``(1, L)`` on the model's device.

    Raises:
        DataError: When there is no tokenizer, or prompt and new tokens do not fit the context.
    """
    if tokenizer is None:
        raise DataError("Text needs the base's tokenizer: pass tokenizer= to from_pretrained.")
    # A chat template writes the token at the beginning of a text itself.
    begun = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
    ids = tokenizer(prompt, add_special_tokens=not begun, return_tensors="pt")["input_ids"].to(model.device)
    longest = context_length(model, tokenizer)
    if not ids.shape[1] or ids.shape[1] + max_new_tokens > longest:
        raise DataError(
            f"The prompt has {ids.shape[1]} tokens; with {max_new_tokens} new ones it must have at least 1 and at most "
            f"{longest - max_new_tokens} to fit the context of {longest}. Shorten it, or ask for fewer new tokens."
        )
    return ids


@dataclass(frozen=True, eq=False)
class Answering(Shipped):
    """One model and the ways in which it can be run.

    Attributes:
        model: A transformers causal LM.
        tokenizer: Its tokenizer, or None.
        ways: Name -> context that the model answers in; the first is what ``auto`` means.
        folder: The artefact that it was opened from; None of a plain model.
    """

    model: Any
    tokenizer: Any
    ways: Mapping[str, Callable[[], AbstractContextManager[Any]]] = field(default_factory=lambda: {"base": nullcontext})
    folder: Path | None = None

    @property
    def experts(self) -> list[str]:
        """Names of the ways."""
        return list(self.ways)

    def generate_text(
        self, prompt: str, *, expert: str = AUTO, max_new_tokens: int = 64, **options: Any
    ) -> tuple[str, str]:
        """Continue a prompt; returns the continuation and the name of the way that wrote it.

        Raises:
            DataError: When there is no tokenizer, or prompt and new tokens do not fit the context.
            UnknownNameError: When there is no such way.
        """
        name = self.experts[0] if expert == AUTO else expert
        if name not in self.ways:
            raise unknown_name("expert", name, [AUTO, *self.experts])
        ids = prompt_ids(self.model, self.tokenizer, prompt, max_new_tokens)
        with self.ways[name]():
            mask = ids.new_ones(ids.shape)
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **options)
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), name
