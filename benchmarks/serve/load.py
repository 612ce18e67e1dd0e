"""Clients of the server, in a process of their own so that they do not take its interpreter's time."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

COMPLETIONS = "/v1/completions"


def body_of(expert: str, prompt: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy, streamed request."""
    return {
        "model": expert,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


async def _one(client: Any, expert: str, prompt: Sequence[int], tokens: int) -> tuple[int, list[float]]:
    """Tokens of an answer, and when it was asked for and each part of it came."""
    times, written = [time.perf_counter()], 0
    async with client.stream("POST", COMPLETIONS, json=body_of(expert, prompt, tokens)) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            said = json.loads(line.removeprefix("data: "))
            if "error" in said:
                raise RuntimeError(said["error"]["message"])
            if said["choices"] and said["choices"][0]["text"]:
                times.append(time.perf_counter())
            written = (said.get("usage") or {}).get("completion_tokens", written)
    return written, times


async def _all(url: str, clients: int, wishes: Sequence[Any]) -> dict[str, Any]:
    import httpx

    waiting = list(reversed(wishes))
    found: list[tuple[int, list[float]]] = []

    async def client(session: Any) -> None:
        while waiting:
            found.append(await _one(session, *waiting.pop()))

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as session:
        # An expert's first use, alone and beside others, makes what it has off ready.
        firsts = list({wish[0]: wish for wish in wishes}.values())
        for wish in firsts:
            await _one(session, *wish)
        await asyncio.gather(*(_one(session, *wish) for wish in firsts))
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        seconds = time.perf_counter() - began
    return {
        "tokens": sum(written for written, _ in found),
        "seconds": seconds,
        "first": sorted(times[1] - times[0] for _, times in found if len(times) > 1),
        "between": sorted(b - a for _, times in found for a, b in itertools.pairwise(times[1:])),
    }


def weigh(url: str, clients: int, wishes: Sequence[Any]) -> dict[str, Any]:
    """What so many clients see that ask one request after the other; a wish is expert, prompt and tokens.

    Returns:
        ``tokens`` of all answers, ``seconds`` for all of them, and sorted seconds to the ``first`` part and ``between`` parts.
    """
    return asyncio.run(_all(url, clients, wishes))
