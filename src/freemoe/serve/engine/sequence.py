"""One sequence while it is read and written; only the engine's thread touches it."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, Literal

from torch import Tensor

from freemoe.serve.engine.choosing import TokenSampler, gather_logprobs
from freemoe.serve.engine.outbox import EventQueue
from freemoe.serve.engine.requests import (
    Event,
    PromptRead,
    SequenceEnd,
    SequenceRequest,
    SlowReaderError,
    TextChunk,
    TokenLogprob,
)
from freemoe.serve.engine.runner import BatchRow
from freemoe.serve.engine.text import IncrementalDetokeniser, StopTexts


class SequenceState:
    """A sequence and where it stands.

    Attributes:
        number: By which the runner knows it.
        fed: Tokens of its prompt that were read.
        written: New tokens.
        since: When its last token came, or when it was asked for.
        ended: How it ended; empty while it has not.
    """

    def __init__(self, ask: SequenceRequest, outbox: EventQueue, tokenizer: Any, ends: Collection[int]) -> None:
        self.ask, self.outbox, self.chooser = ask, outbox, TokenSampler(ask)
        self.number, self.fed, self.written = -1, 0, list[int]()
        self.since, self.ended = time.perf_counter(), ""
        self._tokenizer, self._ends = tokenizer, ends
        self._text, self._stops = IncrementalDetokeniser(tokenizer), StopTexts(ask.stop)
        # Characters made of tokens so far, and emitted; tokens whose text is not emitted.
        self._made, self._emitted, self._pending = 0, 0, list[TokenLogprob]()
        self._prompt: list[TokenLogprob] = []
        self._last: Event | None = None

    @property
    def has_read(self) -> bool:
        """Whether the whole prompt was read."""
        return self.fed == len(self.ask.prompt)

    @property
    def _scores_prompt(self) -> bool:
        return self.ask.echo and self.ask.logprobs is not None

    def finish_unread(self) -> bool:
        """End at once where neither a token nor a log-probability is wanted."""
        if self.ask.max_tokens or self._scores_prompt:
            return False
        self._finish_sequence("length")
        return True

    def required_logits(self, tokens: int) -> Literal["last", "every", "none"]:
        """Which logits it needs of the next tokens of its prompt."""
        if self._scores_prompt:
            return "every"
        return "last" if self.fed + tokens == len(self.ask.prompt) else "none"

    def advance_prompt(self, row: BatchRow, logits: Tensor) -> bool:
        """Take note of what a pass read; whether the last logits choose the next token."""
        if self.has_read:
            return True
        if self._scores_prompt:
            self._score_prompt_tokens(row, logits)
        self.fed += len(row.tokens)
        if not self.has_read:
            return False
        if self._scores_prompt:
            self._emit_event(PromptRead(tuple(self._prompt)))
        if not self.ask.max_tokens and not self.ended:
            self._finish_sequence("length")
        return not self.ended

    def _score_prompt_tokens(self, row: BatchRow, logits: Tensor) -> None:
        """Log-probabilities of the prompt's tokens behind each of the row's."""
        prompt, top = self.ask.prompt, self.ask.logprobs or 0
        following = prompt[self.fed + 1 : self.fed + 1 + len(row.tokens)]
        found = gather_logprobs(logits[: len(following)], following, [top] * len(following))
        self._prompt = self._prompt or [TokenLogprob(prompt[0], 0)]
        for token, (logprob, best) in zip(following, found, strict=True):
            before = self._prompt[-1]
            offset = before.offset + len(self._tokenizer.decode([before.id]))
            self._prompt.append(TokenLogprob(token, offset, logprob, best))

    def append_token(self, token: int, logprob: float | None, best: tuple[tuple[int, float], ...]) -> None:
        """Take the token that was chosen, and emit the text that it completes."""
        if token in self._ends:
            self._finish_sequence("stop")
            return
        self.written.append(token)
        self._pending.append(TokenLogprob(token, self._made, logprob, best))
        text = self._text.add_token(token)
        self._made += len(text)
        told, stopped = self._stops.add_text(text)
        self._emit_text(told, cut=stopped)
        if stopped:
            self._finish_sequence("stop", flush=False)
        elif len(self.written) == self.ask.max_tokens:
            self._finish_sequence("length")

    def _emit_text(self, text: str, cut: bool = False) -> None:
        """Hand on text with the tokens that begin in it."""
        if not text:
            return
        self._emitted += len(text)
        told = tuple(t for t in self._pending if t.offset < self._emitted)
        self._pending = [] if cut else self._pending[len(told) :]
        self._emit_event(TextChunk(text, told))

    def _finish_sequence(self, reason: str, flush: bool = True) -> None:
        if flush and not self.ended:
            text, stopped = self._stops.add_text(self._text.flush_text())
            reason = "stop" if stopped else reason
            text += "" if stopped else self._stops.flush_text()
            if text or (self._pending and not stopped):
                self._emitted += len(text)
                kept = [t for t in self._pending if not stopped or t.offset < self._emitted]
                self._emit_event(TextChunk(text, tuple(kept)))
        if not self.ended:
            self.ended, self._last = reason, SequenceEnd(reason, len(self.written))

    def _emit_event(self, event: Event) -> None:
        """Hand on an event; a reader that does not read loses the rest."""
        if self.ended or self.outbox.put_event(event):
            return
        if self.outbox.is_closed:
            self.ended = "gone"
            return
        self.fail_sequence(
            SlowReaderError(
                f"This answer was ended: {self.outbox.most} pieces of it were written and not read. Read faster, or ask without stream."
            )
        )

    def fail_sequence(self, error: Exception) -> None:
        """End with an error, unless it has ended."""
        if not self.ended:
            self.ended, self._last = "error", SequenceEnd("error", len(self.written), error)

    def emit_end(self) -> None:
        """Hand on how it ended, once; whoever reads that finds it counted."""
        if self._last is not None:
            self.outbox.put_event(self._last)
            self._last = None
