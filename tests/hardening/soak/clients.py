"""The clients of the soak, in a process of their own: right requests, wrong ones, some that go away, and experts that come and go."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.serve.load import COMPLETIONS, body_of

EXPERTS = "/v1/freemoe/experts"
GONE, BAD = 0.05, 0.05
"""Shares of requests that are left in the middle, and that are wrong."""

WRONG: tuple[dict[str, Any], ...] = (
    *({"prompt": prompt} for prompt in ([], [10**9], [5] * 5000)),
    *({"model": "nobody"}, {"max_tokens": 10**7}, {"temperature": "hot"}, {"n": 0}),
    *({"logit_bias": {"5": 1}}, {"suffix": "x"}),
)
_MOST_KEPT = 200


@dataclass
class Clients:
    """All of them, and what they saw."""

    session: httpx.AsyncClient
    asked: Sequence[Any]  # expert, prompt, tokens and right answer of every request there can be
    passing: Sequence[str]  # experts that come and go
    folder: str  # where those are
    seconds: float
    seed: int
    counts: Counter[str] = field(default_factory=Counter)  # absent: an expert that was not there
    differs: list[tuple[int, str]] = field(default_factory=list)  # number of the request, and its answer
    errors: list[str] = field(default_factory=list)  # what came without a cause

    def __post_init__(self):
        self._until = time.monotonic() + self.seconds

    def failed(self, what):
        self.counts["errors"] += 1
        if len(self.errors) < _MOST_KEPT:
            self.errors.append(what[:300])

    async def run(self, clients):
        await asyncio.gather(self._change(), *(self._client(self.seed * 1000 + n) for n in range(clients)))

    async def _client(self, seed):
        rng = random.Random(seed)
        while time.monotonic() < self._until:
            number = rng.randrange(len(self.asked))
            kind = rng.random()
            try:
                if kind < BAD:
                    await self._bad(rng, number)
                elif kind < BAD + GONE:
                    await self._gone(rng, number)
                else:
                    await self._right(number, rng.random() < 0.5)
            except Exception as error:  # whatever a connection does that nobody asked for
                self.failed(f"{type(error).__name__}: {error}")

    async def _right(self, number, streamed):
        expert, prompt, tokens, true = self.asked[number]
        body = body_of(expert, prompt, tokens)
        if not streamed:
            body = {k: v for k, v in body.items() if not k.startswith("stream")}
        answer = await self.session.post(COMPLETIONS, json=body)
        if answer.status_code == 404 and expert in self.passing:
            self.counts["absent"] += 1
            return
        if answer.status_code != 200:
            self.failed(f"{answer.status_code} for {expert}: {answer.text}")
            return
        said = _streamed(answer.text) if streamed else answer.json()["choices"][0]["text"]
        if said is None:
            self.failed(f"in a stream of {expert}: {answer.text[-300:]}")
        elif said == true:
            self.counts["right"] += 1
        else:
            self.counts["differs"] += 1
            if len(self.differs) < _MOST_KEPT:
                self.differs.append((number, said))

    async def _gone(self, rng, number):
        expert, prompt, tokens, _ = self.asked[number]
        async with self.session.stream("POST", COMPLETIONS, json=body_of(expert, prompt, tokens)) as answer:
            left = rng.randint(0, 3)
            async for _ in answer.aiter_lines():
                left -= 1
                if left < 0:
                    break
        self.counts["gone"] += 1

    async def _bad(self, rng, number):
        expert, prompt, tokens, _ = self.asked[number]
        kind = {"content-type": "application/json"}
        if rng.random() < 0.3:
            answer = await self.session.post(COMPLETIONS, content=b"{" * rng.randint(1, 5000), headers=kind)
        else:
            body = {**body_of(expert, prompt, tokens), "model": "base", **rng.choice(WRONG)}
            answer = await self.session.post(COMPLETIONS, json=body)
        if not 400 <= answer.status_code < 500 or "error" not in answer.json():
            self.failed(f"a wrong request got {answer.status_code}: {answer.text}")
        self.counts["bad"] += 1

    async def _change(self):
        """Load the passing experts and drop them, over and over."""
        while time.monotonic() < self._until:
            answer = await self.session.post(EXPERTS, json={"path": self.folder})
            if answer.status_code != 200:
                self.failed(f"loading got {answer.status_code}: {answer.text}")
            self.counts["loads"] += 1
            await asyncio.sleep(0.4)
            for name in sorted(self.passing):
                answer = await self.session.delete(f"{EXPERTS}/{name}")
                if answer.status_code != 200:
                    self.failed(f"dropping got {answer.status_code}: {answer.text}")
            await asyncio.sleep(0.1)


def _streamed(text):
    """The text of a stream; None where it holds an error, or has no end."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    if not lines or lines[-1] != "[DONE]":
        return None
    found = [json.loads(line) for line in lines[:-1]]
    return "".join(choice["text"] for chunk in found for choice in chunk["choices"])


async def _all(url, clients, how):
    limits = httpx.Limits(max_connections=clients + 4)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as session:
        seen = Clients(session, **how)
        await seen.run(clients)
    return {"counts": dict(seen.counts), "differs": seen.differs, "errors": seen.errors}


def weigh(url, clients, how):
    """What so many clients saw; ``how`` is what `Clients` takes."""
    return asyncio.run(_all(url, clients, how))
