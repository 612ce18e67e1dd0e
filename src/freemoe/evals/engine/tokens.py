"""Prompts and answers as token ids, tokenised and cut as lm-eval's HF backend does it, and only once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freemoe.core.errors import DataError, RecipeError
from freemoe.evals.engine.row_plan import TokenPair
from freemoe.evals.tasks.documents import Document


def context_length(model: Any, tokenizer: Any = None) -> int:
    """Longest input of the model in tokens: its config's word for it, else the tokenizer's, else 2,048."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    longest = getattr(tokenizer, "model_max_length", None)
    return int(longest) if isinstance(longest, int) and longest < 10**9 else 2048


class PromptTokenizer:
    """Makes token ids of texts and keeps those it made.

    ``overflow``: ``truncate`` cuts contexts from the left, as lm-eval does, and counts them in ``truncated``; ``error``
    refuses them.
    """

    def __init__(self, tokenizer: Any, max_length: int, overflow: str = "truncate") -> None:
        if tokenizer is None:
            raise DataError(
                "The base model has no tokenizer, and prompts are text. Save one beside the model "
                "(tokenizer.save_pretrained(folder)) or pass tokenizer=."
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.overflow = overflow
        self.truncated: dict[str, int] = {}
        self._pairs: dict[tuple[str, str], TokenPair] = {}
        self._blocks: dict[tuple[tuple[int, ...], int], TokenPair] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._embedding_ids: dict[str, tuple[int, ...]] = {}
        # The choices of a question come one after the other and have one context.
        self._context: tuple[str, tuple[int, ...]] = ("", ())

    @property
    def prefix_id(self) -> int | None:
        """Token that stands before a text with no context: the beginning-of-text or end-of-text token."""
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None else self.tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids as lm-eval makes them: the tokenizer's own special tokens, unless the text starts with one."""
        bos = self.tokenizer.decode(self.prefix_id) if self.prefix_id is not None else ""
        if bos and text.startswith(bos):
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self.tokenizer.encode(text)

    def encode_pair(self, context: str, continuation: str) -> TokenPair:
        """Tokenise a context and its continuation together, then part them where the context's own tokens end.

        Spaces at the context's end go to the continuation, as in lm-eval, so that words keep their usual tokens.
        """
        known = self._pairs.get((context, continuation))
        if known is not None:
            return known
        if context:
            spaces = len(context) - len(context.rstrip())
            left = context[: len(context) - spaces]
            right = context[len(context) - spaces :] + continuation
            if left != self._context[0]:
                self._context = left, tuple(self.encode(left))
            head = self._context[1]
            pair = TokenPair(head, tuple(self.encode(left + right)[len(head) :]))
        else:
            pair = self.text_pair(self.tokenizer.encode(continuation, add_special_tokens=False))
        if not pair.continuation:
            raise DataError(
                f"The continuation {continuation!r} has no tokens of its own after the context that ends in "
                f"{context[-40:]!r}. Give the answer at least one visible character."
            )
        self._pairs[context, continuation] = pair
        return pair

    def text_pair(self, ids: Sequence[int]) -> TokenPair:
        """A text with nothing before it: after the prefix token, or given its own first token where there is none."""
        if self.prefix_id is None or (ids and ids[0] == self.prefix_id):
            return TokenPair(tuple(ids[:1]), tuple(ids[1:]))
        return TokenPair((self.prefix_id,), tuple(ids))

    def document_pairs(self, document: Document) -> list[TokenPair]:
        """The scored continuations of a document, in the order of its answers."""
        if document.kind == "text":
            ids = tuple(document.tokens or self.encode(document.answers[0]))
            if (ids, document.given) not in self._blocks:
                given = document.given
                self._blocks[ids, given] = TokenPair(ids[:given], ids[given:]) if given else self.text_pair(ids)
            return [self._blocks[ids, document.given]]
        contexts = document.contexts or (document.prompt,) * len(document.answers)
        return [self.encode_pair(context, answer) for context, answer in zip(contexts, document.answers, strict=True)]

    def gold_pair(self, document: Document) -> TokenPair:
        """Prompt and gold answer: what calibration reads and what the loss of signed purification is taken on."""
        if document.kind == "text":
            return self.document_pairs(document)[0]
        if document.kind in ("choice", "target") and document.gold is not None:
            context = document.contexts[document.gold] if document.contexts else document.prompt
            return self.encode_pair(context, document.answers[document.gold])
        if not document.reference:
            raise DataError(
                f"Task {document.task!r}, document {document.id!r} has no gold answer, which calibration and signed "
                "purification need. Use a task with gold answers, or --metric random."
            )
        return self.encode_pair(document.prompt, document.reference)

    def prompt_ids(self, document: Document) -> tuple[int, ...]:
        """Token ids of the prompt without special tokens, cut to the context: what features are made of."""
        if document.kind == "text":
            ids = document.tokens or tuple(self.encode(document.answers[0]))
            if document.prompt:  # a response: whoever routes knows what comes before it only
                special = self.tokenizer.all_special_ids
                ids = tuple(t for t in ids[: document.given] if t not in special)
            return ids[-self.max_length :]
        if document.prompt not in self._embedding_ids:
            ids = self.tokenizer.encode(document.prompt, add_special_tokens=False)[-self.max_length :]
            self._embedding_ids[document.prompt] = tuple(ids)
        return self._embedding_ids[document.prompt]

    def fit_to_context(self, pair: TokenPair, task: str = "") -> TokenPair:
        """The same continuation after as much of its context as fits.

        Raises:
            DataError: When the continuation alone is longer than the context, or ``overflow="error"`` and the
                prompt is.
        """
        length = len(pair.context) + len(pair.continuation)
        if len(pair.continuation) > self.max_length:
            raise DataError(
                f"An answer of task {task or '?'!r} has {len(pair.continuation)} tokens, more than the model's context of "
                f"{self.max_length}. Leave the document out or use a model with a longer context."
            )
        if length > self.max_length + 1:
            if self.overflow == "error":
                raise DataError(
                    f"A prompt of task {task or '?'!r} has {length} tokens with its answer, the model's context is "
                    f"{self.max_length}. Use fewer few-shot examples (task@N), or --overflow truncate to cut prompts "
                    "from the left as lm-eval does."
                )
            self.truncated[task] = self.truncated.get(task, 0) + 1
        # The last token is only predicted.
        return TokenPair(pair.context[-(self.max_length + 1 - len(pair.continuation)) :], pair.continuation)

    def encode_prompt(self, text: str, new: int) -> tuple[int, ...]:
        """Token ids of a prompt, cut from the left so that ``new`` tokens can follow.

        Raises:
            RecipeError: When ``new`` leaves no room for a prompt.
            DataError: When ``overflow="error"`` and the prompt is too long.
        """
        room = self.max_length - new
        if room <= 0:
            raise RecipeError(
                f"max_new_tokens is {new}, the model's context is {self.max_length}: no room is left for a prompt. Ask for "
                f"fewer than {self.max_length} new tokens."
            )
        if text not in self._prompts:
            self._prompts[text] = tuple(self.encode(text))
        ids = self._prompts[text]
        if len(ids) > room:
            if self.overflow == "error":
                raise DataError(
                    f"A prompt has {len(ids)} tokens; with {new} new ones the context of {self.max_length} leaves room for "
                    f"{room}. Shorten it, or use --overflow truncate."
                )
            self.truncated["generate"] = self.truncated.get("generate", 0) + 1
        return ids[-room:]
