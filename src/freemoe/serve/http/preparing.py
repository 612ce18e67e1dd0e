"""From what a request says to what the engine is asked: model names, prompts as tokens, sampling."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from freemoe.core.registry import unknown_name
from freemoe.evals.engine.answering import require_tokenizer, text_ids
from freemoe.evals.engine.sampling import SamplingConfig
from freemoe.recipes.expert_names import AUTO, BASE, PREFIX, ExpertRef
from freemoe.serve.catalogue import ServedExperts, model_names
from freemoe.serve.engine.engine import require_fit
from freemoe.serve.engine.requests import SequenceRequest
from freemoe.serve.engine.routing import RoutedPrompt, route_prompts
from freemoe.serve.http.bodies import ChatBody, CommonBody, CompletionBody, Message
from freemoe.serve.http.errors import RequestError
from freemoe.serve.settings import RequestLimits
from freemoe.text.chat import as_prompt, has_template, plain_prompt

Found = TypeVar("Found")


class RequestPreprocessor:
    """Makes prompts and asks of bodies, for one engine."""

    def __init__(self, experts: ServedExperts, bounds: RequestLimits) -> None:
        self.engine, self.experts, self.bounds = experts.engine, experts, bounds
        # One thread: a tokenizer is not made for several that change its settings.
        self._pool = ThreadPoolExecutor(1, "freemoe tokens")

    @property
    def served_models(self) -> list[str]:
        """Names that a request's ``model`` can have."""
        return model_names(self.experts.catalogue.expert_names, getattr(self.engine.host, "router", None) is not None)

    def expert_of(self, model: str) -> str:
        """The expert, or ``auto``, that a model's name means: ``base``, ``auto``, ``base:math``, ``math``, ``base:math+code``."""
        name = model.removeprefix(PREFIX).strip()
        if name == AUTO:
            return AUTO
        ref = ExpertRef.parse(name)
        if name != BASE and not set(ref.names) <= set(self.experts.catalogue.expert_names):
            error = unknown_name("model", model, self.served_models, "Experts are combined as base:a+b.")
            raise RequestError(404, str(error), param="model", code="model_not_found")
        return str(ExpertRef(tuple(sorted(set(ref.names))), ref.operation))

    async def _run_in_pool(self, work: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def prompts_of(self, body: CompletionBody | ChatBody) -> list[RoutedPrompt]:
        """The prompts of a completion, in order, or the one of a conversation."""
        if isinstance(body, ChatBody):
            self._require_count(1, body)
            return await self._attach_experts(body, [await self.chat_ids(body.messages)])
        given = body.prompt
        several: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
        self._require_count(len(several), body)
        ids = await self._run_in_pool(lambda: [self._token_ids(one) for one in several])
        return await self._attach_experts(body, ids)

    async def chat_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A conversation's tokens, by the tokenizer's chat template where it has one."""
        tokenizer = self.engine.host.tokenizer
        require_tokenizer(tokenizer)
        said = [message.template_message for message in messages]

        def render_chat() -> tuple[int, ...]:
            return self._token_ids(
                as_prompt(tokenizer, said, "messages") if has_template(tokenizer) else plain_prompt(said)
            )

        return await self._run_in_pool(render_chat)

    async def text_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, tokenised in a thread."""
        return await self._run_in_pool(lambda: self._token_ids(text))

    def _token_ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        host = self.engine.host
        if isinstance(prompt, str):
            require_tokenizer(host.tokenizer)
            return tuple(text_ids(host.tokenizer, prompt))
        size = host.model.get_input_embeddings().weight.shape[0]
        wrong = next((token for token in prompt if not 0 <= token < size), None)
        if wrong is not None:
            raise RequestError(
                400, f"The prompt has the token {wrong}; this model's tokens are 0 to {size - 1}.", param="prompt"
            )
        return tuple(prompt)

    def _require_count(self, prompts: int, body: CommonBody) -> None:
        answers, most = prompts * (body.n or 1), min(self.bounds.choices, self.engine.limits.queue)
        if not prompts or answers > most:
            raise RequestError(
                400,
                f"{prompts} prompts with n={body.n or 1} are {answers} answers; 1 to {most} are given to one request.",
                param="prompt" if not prompts else "n",
            )
        if len(body.stop_texts) > self.bounds.stops or any(len(text) > 1000 for text in body.stop_texts):
            raise RequestError(
                400,
                f"stop has {len(body.stop_texts)} texts; at most {self.bounds.stops} of 1,000 characters each.",
                param="stop",
            )

    async def _attach_experts(
        self, body: CompletionBody | ChatBody, prompts: list[tuple[int, ...]]
    ) -> list[RoutedPrompt]:
        name = self.expert_of(body.model)
        for ids in prompts:
            require_fit(ids, 1 if body.max_new_tokens is None else body.max_new_tokens, self.engine.limits.context)
        if name != AUTO:
            await self.experts.ensure_loaded(name)
            return [RoutedPrompt(ids, name) for ids in prompts]
        routed = await self.route_prompts(prompts)
        for expert in dict.fromkeys(prompt.expert for prompt in routed):
            await self.experts.ensure_loaded(expert)
        return routed

    async def route_prompts(self, prompts: Sequence[Sequence[int]]) -> list[RoutedPrompt]:
        """What the router says of prompts."""
        host, known = self.engine.host, self.experts.catalogue.expert_names
        return await asyncio.wrap_future(self.engine.run_between_steps(lambda: route_prompts(host, prompts, known)))

    def build_requests(self, body: CompletionBody | ChatBody, prompts: Sequence[RoutedPrompt]) -> list[SequenceRequest]:
        """What the engine is asked: the answers to the first prompt, then those to the second ..."""
        temperature = 1.0 if body.temperature is None else body.temperature
        seed = secrets.randbits(62) if body.seed is None else body.seed
        sampling = SamplingConfig(1, temperature, 1.0 if body.top_p is None else body.top_p, seed)
        context = self.engine.limits.context
        # OpenAI's 16 of a completion, and of a chat all that fit.
        most = context if isinstance(body, ChatBody) else 16
        return [
            SequenceRequest(
                prompt.ids,
                prompt.expert,
                min(most, context - len(prompt.ids)) if body.max_new_tokens is None else body.max_new_tokens,
                sampling,
                top_k=max(0, body.top_k or 0),
                min_p=body.min_p or 0.0,
                presence=body.presence_penalty or 0.0,
                frequency=body.frequency_penalty or 0.0,
                repetition=body.repetition_penalty or 1.0,
                choice=choice,
                stop=tuple(body.stop_texts),
                logprobs=body.num_logprobs,
                echo=isinstance(body, CompletionBody) and bool(body.echo),
            )
            for prompt in prompts
            for choice in range(body.n or 1)
        ]
