"""Answers in OpenAI's words; pure functions of what the engine said."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from freemoe.serve.engine.requests import TokenLogprob
from freemoe.serve.engine.routing import RoutedPrompt

Decode = Callable[[int], str]
"""A token's text, special tokens too."""


@dataclass
class AnswerChoice:
    """One answer as far as it is known."""

    prompt: int  # Which of the prompts it answers
    text: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list)  # Of the text, with their log-probabilities
    read: list[TokenLogprob] = field(default_factory=list)  # The prompt's tokens with theirs, where they were asked for
    reason: str = ""  # Why it ended; empty while it has not
    written: int = 0


@dataclass(frozen=True)
class ResponseBuilder:
    """What every document of one answer begins with."""

    model: str
    prompts: Sequence[RoutedPrompt]
    chat: bool
    decode: Decode  # A token's text
    logprobs: bool  # Whether log-probabilities are told
    ignored: Sequence[str] = ()  # Fields of the request that do nothing
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))  # Seconds since 1970

    def build_document(self, choices: list[dict[str, Any]], streamed: bool = False) -> dict[str, Any]:
        """Choices with what stands around them."""
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def build_headers(self) -> dict[str, str]:
        """Who answers, and how sure the router is, for each prompt; and what the request asked for in vain."""
        experts = [quote(p.expert, safe="/+&:-_.~ ") for p in self.prompts]
        sure = [p.confidence for p in self.prompts]
        said = {"x-freemoe-expert": ",".join(dict.fromkeys(experts)) if len(set(experts)) == 1 else ",".join(experts)}
        if all(value is not None for value in sure):
            said["x-freemoe-confidence"] = ",".join(f"{value:.6f}" for value in sure)
        if self.ignored:
            said["x-freemoe-ignored"] = ",".join(map(quote, self.ignored))
        # A header has its bounds too; usage has them all.
        return {name: value for name, value in said.items() if len(value) <= 4000}

    def build_usage(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """Tokens read and written, and who wrote them; of several prompts a list."""
        read, written = sum(len(p.ids) for p in self.prompts), sum(choice.written for choice in choices)
        experts, sure = [p.expert for p in self.prompts], [p.confidence for p in self.prompts]
        several = len(self.prompts) > 1
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "freemoe": {"expert": experts if several else experts[0], "confidence": sure if several else sure[0]},
        }

    def build_choice(self, number: int, choice: AnswerChoice, echoed: str | None) -> dict[str, Any]:
        """A finished answer, behind the prompt where that is echoed."""
        told = self._build_logprobs(choice.tokens, len(echoed or ""))
        if told is not None and echoed is not None:
            read = completion_logprobs(choice.read, self.decode)
            told = {key: read[key] + told[key] for key in told}
        if self.chat:
            said: dict[str, Any] = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        else:
            said = {"text": (echoed or "") + choice.text}
        return {"index": number, **said, "logprobs": told, "finish_reason": choice.reason}

    def build_chunk(
        self,
        number: int,
        text: str,
        tokens: Sequence[TokenLogprob] = (),
        *,
        before: int = 0,
        first: bool = False,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """A part of an answer that is streamed.

        ``before``: characters of a prompt that is repeated; ``first``: whether it is the first part of a chat's answer, which
        says whose it is.
        """
        if self.chat:
            said: dict[str, Any] = {"delta": {"role": "assistant"} if first else {}}
            if text or first:
                said["delta"]["content"] = text
        else:
            said = {"text": text}
        told = self._build_logprobs(tokens, before) if tokens else None
        return {"index": number, **said, "logprobs": told, "finish_reason": reason}

    def _build_logprobs(self, tokens: Sequence[TokenLogprob], before: int = 0) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return chat_logprobs(tokens, self.decode) if self.chat else completion_logprobs(tokens, self.decode, before)


def completion_logprobs(tokens: Sequence[TokenLogprob], decode: Decode, before: int = 0) -> dict[str, Any]:
    """Log-probabilities as ``/v1/completions`` has them.

    ``before``: characters that stand before the text their offsets count in.
    """
    return {
        "tokens": [decode(token.id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [None if token.logprob is None else _by_text(token, decode) for token in tokens],
        "text_offset": [before + token.offset for token in tokens],
    }


def _by_text(token: TokenLogprob, decode: Decode) -> dict[str, float]:
    """The likeliest tokens by their text, and the token itself; of several that look alike the likeliest."""
    found: dict[str, float] = {}
    for other, logprob in (*token.top, (token.id, token.logprob)):
        found.setdefault(decode(other), logprob or 0.0)
    return found


def chat_logprobs(tokens: Sequence[TokenLogprob], decode: Decode) -> dict[str, Any]:
    """Log-probabilities as ``/v1/chat/completions`` has them."""

    def token_entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = decode(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    rows = [
        {
            **token_entry(token.id, token.logprob),
            "top_logprobs": [token_entry(other, logprob) for other, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": rows, "refusal": None}
