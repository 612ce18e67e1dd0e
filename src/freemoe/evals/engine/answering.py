"""A model that continues a text: what every opened artefact can do, whatever it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from freemoe.core.errors import ArtifactError, DataError
from freemoe.core.registry import unknown_name
from freemoe.core.threads import model_lock_of
from freemoe.evals.engine.scorer import context_length
from freemoe.hub.push import copy_artefact, push_artefact
from freemoe.recipes.expert_names import AUTO, BASE


class LoadedArtifact:
    """What `freemoe.load` returns: a base and the artefact on it, which can be copied and pushed."""

    model: Any  # The transformers model that runs
    tokenizer: Any  # The base's; None where there is none
    folder: Path | None = None  # The artefact's, on this machine; None of what was not opened from one

    def generate_text(
        self, prompt: str, *, expert: str = AUTO, max_new_tokens: int = 64, **options: Any
    ) -> tuple[str, str]:
        """Continue a prompt; returns the continuation and the name of what wrote it."""
        raise NotImplementedError

    def _require_folder(self) -> Path:
        """The folder whose files say what this is."""
        if self.folder is None:
            raise ArtifactError(
                f"This {type(self).__name__} was not opened from an artefact's folder, so there are no files to copy or push. Open "
                "the folder that a run wrote; of a plain model use its own save_pretrained or push_to_hub (.model)."
            )
        return self.folder

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Copy the artefact, byte for byte; its base is no part of it.

        Args:
            folder: A new or empty folder.
            overwrite: Replace an artefact that stands there.

        Raises:
            ArtifactError: This was not opened from an artefact, it was damaged since, or something stands at the target.
        """
        return copy_artefact(self._require_folder(), folder, overwrite=overwrite)

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
        """Write the artefact to a repository of the hub; its base is no part of it.

        Args:
            repo_id: ``owner/name``; made if there is none.
            private: Whether a new repository is private.
            token: With the right to write; ``HF_TOKEN`` or what ``hf auth login`` kept if absent.
            revision: Branch, made if there is none.
            commit_message: Of the one commit.
            overwrite: Replace what stands there, where it is of another kind.

        Returns:
            Repository, url, files with their bytes, and the commit.

        Raises:
            ArtifactError, HubError: As `freemoe.hub.push.push_artefact`.
        """
        return push_artefact(
            self._require_folder(),
            repo_id,
            private=private,
            token=token,
            revision=revision,
            message=commit_message,
            overwrite=overwrite,
        )


def require_tokenizer(tokenizer: Any) -> None:
    """Raise where text is given and no tokenizer is known.

    Raises:
        DataError: Says how to pass one.
    """
    if tokenizer is None:
        raise DataError("Text needs the base's tokenizer: pass tokenizer= to from_pretrained.")


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt, with the beginning-of-text token exactly once."""
    # A chat template writes the token at the beginning of a text itself.
    begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return list(tokenizer(text, add_special_tokens=not begun)["input_ids"])


def padded_ids(model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int) -> tuple[Tensor, Tensor]:
    """Prompts as token ids ``(B, L)`` with padding at the left, and their mask, on the model's device.

    Raises:
        DataError: When there is no tokenizer, or a prompt and new tokens do not fit the context.
    """
    require_tokenizer(tokenizer)
    longest = context_length(model, tokenizer)
    rows = [torch.tensor(text_ids(tokenizer, prompt), dtype=torch.long) for prompt in prompts]
    for number, row in enumerate(rows):
        if not len(row) or len(row) + max_new_tokens > longest:
            which = "The prompt" if len(rows) == 1 else f"Prompt {number} (counted from 0)"
            raise DataError(
                f"{which} has {len(row)} tokens; with {max_new_tokens} new ones it must have at least 1 and at most "
                f"{longest - max_new_tokens} to fit the context of {longest}. Shorten it, or ask for fewer new tokens."
            )
    # What stands under padding is masked; any token does.
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    ids, mask = (
        pad_sequence(parts, batch_first=True, padding_value=value, padding_side="left").to(model.device)
        for parts, value in ((rows, pad), ([torch.ones_like(row) for row in rows], 0))
    )
    return ids, mask


@dataclass(frozen=True, eq=False)
class Answering(LoadedArtifact):
    """One model and the ways in which it can be run.

    Threads take turns at the model, from the prompt to the last token. ``model`` itself, used directly, is as safe as any of
    transformers' (a converted model keeps no state between calls) where no way is open.
    """

    model: Any
    tokenizer: Any
    # Name -> context that the model answers in; the first is what ``auto`` means
    ways: Mapping[str, Callable[[], AbstractContextManager[Any]]] = field(default_factory=lambda: {BASE: nullcontext})
    folder: Path | None = None  # The artefact that it was opened from; None of a plain model

    @property
    def experts(self) -> list[str]:
        """Names of the ways in which the model can answer."""
        return list(self.ways)

    @overload
    def generate_text(
        self, prompt: str, *, expert: str = ..., max_new_tokens: int = ..., **options: Any
    ) -> tuple[str, str]: ...

    @overload
    def generate_text(
        self, prompt: Sequence[str], *, expert: str = ..., max_new_tokens: int = ..., **options: Any
    ) -> list[tuple[str, str]]: ...

    def generate_text(
        self, prompt: str | Sequence[str], *, expert: str = AUTO, max_new_tokens: int = 64, **options: Any
    ) -> tuple[str, str] | list[tuple[str, str]]:
        """Continue a prompt; returns the continuation and the name of the way that wrote it. Of several a list of both.

        Raises:
            DataError: When there is no tokenizer, or a prompt and new tokens do not fit the context.
            UnknownNameError: When there is no such way.
        """
        name = self.experts[0] if expert == AUTO else expert
        if name not in self.ways:
            raise unknown_name("expert", name, [AUTO, *self.experts])
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not texts:
            return []
        with model_lock_of(self.model).hold_lock():
            ids, mask = padded_ids(self.model, self.tokenizer, texts, max_new_tokens)
            with self.ways[name]():
                out = self.model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **options)
            said = self.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        return (said[0], name) if isinstance(prompt, str) else [(text, name) for text in said]
