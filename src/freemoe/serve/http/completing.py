"""``/v1/completions`` and ``/v1/chat/completions``: from a body to an answer, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from freemoe.serve.engine.engine import Engine
from freemoe.serve.engine.outbox import EventQueue
from freemoe.serve.engine.requests import Done, Failed, Piece, PromptRead
from freemoe.serve.http.answers import Choice, Heading
from freemoe.serve.http.bodies import ChatBody, CompletionBody
from freemoe.serve.http.errors import said_of
from freemoe.serve.http.metrics import Metrics
from freemoe.serve.http.preparing import Prompt, RequestPreprocessor
from freemoe.serve.http.streams import EventStream, event_line, events, unless_gone
from freemoe.serve.settings import RequestLimits


class CompletionService:
    """Answers prompts and conversations.

    Args:
        engine: Who writes.
        preparing: Makes asks of bodies.
        metrics: Counts what the router does.
        bounds: Of requests.
    """

    def __init__(self, engine: Engine, preparing: RequestPreprocessor, metrics: Metrics, bounds: RequestLimits) -> None:
        self._engine, self._preparing, self._metrics, self._bounds = engine, preparing, metrics, bounds
        self._decode = functools.lru_cache(1 << 16)(lambda token: engine.host.tokenizer.decode([token]))

    async def completions(self, request: Request, body: CompletionBody) -> Response:
        """``POST /v1/completions``."""
        return await self._answer(request, body, await self._preparing.completion_prompts(body))

    async def chat(self, request: Request, body: ChatBody) -> Response:
        """``POST /v1/chat/completions``."""
        return await self._answer(request, body, await self._preparing.chat_prompts(body))

    async def _answer(self, request: Request, body: CompletionBody | ChatBody, prompts: list[Prompt]) -> Response:
        is_chat, logprobs = isinstance(body, ChatBody), body.num_logprobs is not None
        heading = Heading(body.model, prompts, is_chat, self._decode, logprobs, body.ignored)
        for prompt in prompts:
            if prompt.picked.confidence is not None:
                self._metrics.routed(prompt.picked.expert, prompt.picked.confidence)
        outboxes = self._engine.submit(self._preparing.asks(body, prompts))

        def close() -> None:
            for outbox in outboxes:
                outbox.close()

        if body.stream:
            chunks = self._stream(body, heading, outboxes)
            return EventStream(chunks, close, self._bounds.seconds, heading.headers())
        try:
            choices = await unless_gone(request.receive, self._collect(body, outboxes))
        finally:
            close()
        echoed = self._echoed(body, prompts)
        told = [heading.whole_choice(i, c, echoed[c.prompt] if echoed else None) for i, c in enumerate(choices)]
        return JSONResponse(heading.document(told) | {"usage": heading.usage(choices)}, headers=heading.headers())

    def _echoed(self, body: CompletionBody | ChatBody, prompts: Sequence[Prompt]) -> list[str]:
        """The prompts' texts, where they are to be repeated."""
        if not isinstance(body, CompletionBody) or not body.echo:
            return []
        if isinstance(body.prompt, str):
            return [body.prompt]
        return [
            given if isinstance(given, str) else self._engine.host.tokenizer.decode(list(prompt.ids))
            for given, prompt in zip(
                [body.prompt] if isinstance(body.prompt[0], int) else body.prompt, prompts, strict=True
            )
        ]

    async def _collect(self, body: CompletionBody | ChatBody, outboxes: Sequence[EventQueue]) -> list[Choice]:
        """All answers, whole."""
        choices = [Choice(number // (body.n or 1)) for number in range(len(outboxes))]
        async for number, event in events(outboxes):
            choice = choices[number]
            match event:
                case PromptRead():
                    choice.read.extend(event.tokens)
                case Piece():
                    choice.text += event.text
                    choice.tokens.extend(event.tokens)
                case Done():
                    choice.reason, choice.written = event.reason, event.tokens
                case Failed():
                    raise event.error
        return choices

    async def _stream(
        self, body: CompletionBody | ChatBody, heading: Heading, outboxes: Sequence[EventQueue]
    ) -> AsyncIterator[bytes]:
        echoed, each = self._echoed(body, heading.prompts), body.n or 1
        choices = [Choice(number // each) for number in range(len(outboxes))]
        usage = {"usage": None} if body.includes_usage else {}

        def chunk(*part: Any, **how: Any) -> bytes:
            return event_line(heading.document([heading.chunk(*part, **how)], streamed=True) | usage)

        for number, choice in enumerate(choices):
            if heading.chat:
                yield chunk(number, "", first=True)
            elif echoed and body.logprobs is None:
                yield chunk(number, echoed[choice.prompt])
        async for number, event in events(outboxes):
            choice = choices[number]
            before = len(echoed[choice.prompt]) if echoed else 0
            match event:
                case PromptRead():
                    yield chunk(number, echoed[choice.prompt], event.tokens)
                case Piece():
                    yield chunk(number, event.text, event.tokens, before=before)
                case Done():
                    choice.written = event.tokens
                    yield chunk(number, "", reason=event.reason)
                case Failed():
                    yield event_line(said_of(event.error).body)
                    return
        if body.includes_usage:
            yield event_line(heading.document([], streamed=True) | {"usage": heading.usage(choices)})
        yield event_line("[DONE]")
