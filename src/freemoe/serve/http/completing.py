"""``/v1/completions`` and ``/v1/chat/completions``: from a body to an answer, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from freemoe.serve.engine.outbox import EventQueue
from freemoe.serve.engine.requests import PromptRead, SequenceEnd, TextChunk
from freemoe.serve.engine.routing import RoutedPrompt
from freemoe.serve.http.answers import AnswerChoice, ResponseBuilder
from freemoe.serve.http.bodies import ChatBody, CompletionBody
from freemoe.serve.http.errors import request_error_of
from freemoe.serve.http.preparing import RequestPreprocessor
from freemoe.serve.http.streams import EventStream, cancel_on_disconnect, event_line, merge_events
from freemoe.serve.metrics import ServerMetrics


class CompletionService:
    """Answers prompts and conversations, whole or streamed."""

    def __init__(self, preparing: RequestPreprocessor, metrics: ServerMetrics) -> None:
        self._preparing, self._engine, self._metrics = preparing, preparing.engine, metrics
        self._decode = functools.lru_cache(1 << 16)(lambda token: self._engine.host.tokenizer.decode([token]))

    async def completions(self, request: Request, body: CompletionBody) -> Response:
        """Answer ``POST /v1/completions``, streamed or whole."""
        return await self._answer_request(request, body)

    async def chat(self, request: Request, body: ChatBody) -> Response:
        """Answer ``POST /v1/chat/completions``, streamed or whole."""
        return await self._answer_request(request, body)

    async def _answer_request(self, request: Request, body: CompletionBody | ChatBody) -> Response:
        prompts = await self._preparing.prompts_of(body)
        is_chat, logprobs = isinstance(body, ChatBody), body.num_logprobs is not None
        heading = ResponseBuilder(body.model, prompts, is_chat, self._decode, logprobs, list(body.model_extra or ()))
        for prompt in prompts:
            if prompt.confidence is not None:
                self._metrics.routed.labels(prompt.expert).inc()
                self._metrics.confidence.observe(prompt.confidence)
        outboxes = self._engine.submit(self._preparing.build_requests(body, prompts))

        def close_outboxes() -> None:
            for outbox in outboxes:
                outbox.close()

        if body.stream:
            chunks = self._stream_chunks(body, heading, outboxes)
            return EventStream(chunks, close_outboxes, self._preparing.bounds.seconds, heading.build_headers())
        try:
            choices = await cancel_on_disconnect(request.receive, self._collect_choices(body, outboxes))
        finally:
            close_outboxes()
        echoed = self._echoed_prompts(body, prompts)
        told = [heading.build_choice(i, c, echoed[c.prompt] if echoed else None) for i, c in enumerate(choices)]
        return JSONResponse(
            heading.build_document(told) | {"usage": heading.build_usage(choices)}, headers=heading.build_headers()
        )

    def _echoed_prompts(self, body: CompletionBody | ChatBody, prompts: Sequence[RoutedPrompt]) -> list[str]:
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

    async def _collect_choices(
        self, body: CompletionBody | ChatBody, outboxes: Sequence[EventQueue]
    ) -> list[AnswerChoice]:
        choices = [AnswerChoice(number // (body.n or 1)) for number in range(len(outboxes))]
        async for number, event in merge_events(outboxes):
            choice = choices[number]
            match event:
                case PromptRead():
                    choice.read.extend(event.tokens)
                case TextChunk():
                    choice.text += event.text
                    choice.tokens.extend(event.tokens)
                case SequenceEnd(error=Exception() as error):
                    raise error
                case SequenceEnd():
                    choice.reason, choice.written = event.reason, event.tokens
        return choices

    async def _stream_chunks(
        self, body: CompletionBody | ChatBody, heading: ResponseBuilder, outboxes: Sequence[EventQueue]
    ) -> AsyncIterator[bytes]:
        echoed, each = self._echoed_prompts(body, heading.prompts), body.n or 1
        choices = [AnswerChoice(number // each) for number in range(len(outboxes))]
        usage = {"usage": None} if body.includes_usage else {}

        def chunk_line(*part: Any, **how: Any) -> bytes:
            return event_line(heading.build_document([heading.build_chunk(*part, **how)], streamed=True) | usage)

        for number, choice in enumerate(choices):
            if heading.chat:
                yield chunk_line(number, "", first=True)
            elif echoed and body.logprobs is None:
                yield chunk_line(number, echoed[choice.prompt])
        async for number, event in merge_events(outboxes):
            choice = choices[number]
            before = len(echoed[choice.prompt]) if echoed else 0
            match event:
                case PromptRead():
                    yield chunk_line(number, echoed[choice.prompt], event.tokens)
                case TextChunk():
                    yield chunk_line(number, event.text, event.tokens, before=before)
                case SequenceEnd(error=Exception() as error):
                    yield event_line(request_error_of(error).json_body)
                    return
                case SequenceEnd():
                    choice.written = event.tokens
                    yield chunk_line(number, "", reason=event.reason)
        if body.includes_usage:
            yield event_line(heading.build_document([], streamed=True) | {"usage": heading.build_usage(choices)})
        yield event_line("[DONE]")
