"""How often a sequence's neighbours in a server's batch change its greedy answer, by dtype and kind of expert.

Random prompts on the bundled base, six random experts with 1 % off, 16 sequences side by side, against `generate` alone:

    python -m benchmarks.serve.neighbours --count 240
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from benchmarks.serve.material import Wish, generated, random_experts, wishes
from freemoe import FreeMoE
from freemoe.assets import BUNDLED
from freemoe.models.checkpoints.loading import load_base
from freemoe.serve.engine.engine import InferenceEngine
from freemoe.serve.engine.outbox import EventQueue
from freemoe.serve.engine.requests import SequenceEnd, SequenceRequest, TextChunk
from freemoe.serve.http.streams import merge_events
from freemoe.serve.settings import EngineLimits

KINDS = {
    "base": ["base"],
    "one expert": list("abcdef"),
    "union": ["a+b", "c+d", "e+f"],
    "intersection": ["a&b", "c&d", "e&f"],
}


def answers(moe: FreeMoE, requests: list[Wish], batch_invariant: bool) -> list[list[int]]:
    """The tokens that the engine writes, all requests at once."""
    engine = InferenceEngine(moe, EngineLimits(256, queue=len(requests), batch_invariant=batch_invariant)).start()
    try:
        boxes = engine.submit([SequenceRequest(w.prompt, w.expert, w.tokens) for w in requests])
        return asyncio.run(_tokens(boxes))
    finally:
        engine.stop()


async def _tokens(boxes: Sequence[EventQueue]) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in boxes]
    async for number, event in merge_events(boxes):
        match event:
            case TextChunk():
                tokens[number] += [token.id for token in event.tokens]
            case SequenceEnd(error=Exception() as error):
                raise error
    return tokens


@torch.no_grad()
def gap(moe: FreeMoE, request: Wish, tokens: list[int]) -> float:
    """Nats between the two likeliest tokens behind a prompt and some tokens."""
    logits = moe(torch.tensor([[*request.prompt, *tokens]]), expert=request.expert).logits[0, -1].float()
    return float(-logits.topk(2).values.diff())


def main() -> None:
    """Print a row of the table for each dtype and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=240, help="requests of each row")
    count = parser.parse_args().count
    kinds = [
        (kind, names[i // len(KINDS) % len(names)])
        for i in range(count)
        for kind, names in [list(KINDS.items())[i % 4]]
    ]
    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = load_base(BUNDLED, None, "float32", "cpu")
        model.to(dtype).generation_config.eos_token_id = None
        moe = FreeMoE(model, random_experts(model, "abcdef", 0), None, tokenizer)
        requests = wishes(moe, count, 24, [name for _, name in kinds], 0)
        true = [generated(moe, request) for request in requests]
        for batch_invariant in (False, True):
            changed, gaps = Counter(), defaultdict(float)
            found = answers(moe, requests, batch_invariant)
            for (kind, _), request, own, other in zip(kinds, requests, true, found, strict=True):
                if own != other:
                    agreed = next(i for i, pair in enumerate(zip(own, other, strict=True)) if len(set(pair)) > 1)
                    changed[kind] += 1
                    gaps[kind] = max(gaps[kind], gap(moe, request, own[:agreed]))
            row = [f"{changed[kind]} of {count // 4}" for kind in KINDS]
            way = "`--batch-invariant`" if batch_invariant else "in one batch"
            print("|", " | ".join([f"{dtype}, {way}", *row, f"{max(gaps.values(), default=0):.4f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
