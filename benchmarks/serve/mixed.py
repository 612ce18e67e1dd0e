"""T6: a batch of 8 sequences over 4 experts, against the base on the same batch, a switch per sequence, and LoRA per sequence.

All sides run the same loop: a pass over the prompts, then one token per sequence and pass. LoRA is PEFT's, r=8 beside every
linear, as many adapters as there are experts, with ``adapter_names``.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.compat import with_lora_adapters
from benchmarks.devices import is_accelerator
from benchmarks.harness import Figure, Outcome, Settings, in_turns, one_clock, ratio
from benchmarks.serve.material import random_experts
from benchmarks.speed.shapes import shaped_model
from freemoe.core.errors import NumericError
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.weights import find_weights

SEQUENCES, EXPERTS, RANK = 8, 4, 8
NAMES = [f"expert{i}" for i in range(EXPERTS)]
PROMPT, NEW = 32, 16
OVER_DENSE, OVER_DENSE_THERE, OVER_SWAP, OVER_LORA, MOST_MEMORY = 0.8, 0.9, 3.0, 1.3, 4.0
Pass = Callable[..., Any]


def run(settings: Settings) -> Outcome:
    """Measure the bundled base and one of 135M, in two precisions; and what experts hold."""
    figures: list[Figure] = []
    details: dict[str, Any] = {"threads": torch.get_num_threads(), "sequences": SEQUENCES, "experts": EXPERTS}
    with settings.progress.stage("mixed", 5) as advance:
        for name in ("bundled", "135M"):
            for dtype in (torch.float32, torch.bfloat16):
                label = f"{name}, {str(dtype).removeprefix('torch.')}"
                if not settings.wants(label):
                    continue
                moe = _mixture(name, dtype, settings)
                found = _contest(moe, settings)
                figures += _figures(label, found, is_accelerator(settings.device))
                details[label] = found
                if dtype == torch.float32:
                    figures.append(_memory(name, moe))
                advance(1)
        figures.append(_memory("1.1G", _mixture("1.1G", torch.float32, settings)))
        advance(1)
    return Outcome(tuple(figures), details)


def _mixture(name: str, dtype: torch.dtype, settings: Settings) -> FreeMoE:
    if name == "bundled":
        model, _ = load_base("freemoe-demo", device=settings.device)
        model = model.to(dtype)
    else:
        # One layer has the same share of everything as 22 of them.
        changes = {"num_hidden_layers": 1, "vocab_size": 1000} if name == "1.1G" else {}
        model = shaped_model(name, settings, dtype, **changes)
    return FreeMoE(model, random_experts(model, NAMES, settings.seed))


def _contest(moe: FreeMoE, settings: Settings) -> dict[str, Any]:
    """Seconds of all sides, prompts and tokens apart, and how far mixed answers are from those of single experts."""
    model = moe.model
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(3, model.config.vocab_size, (SEQUENCES, PROMPT), generator=generator).to(model.device)
    names = [NAMES[i % EXPERTS] for i in range(SEQUENCES)]
    lora = with_lora_adapters(
        copy.deepcopy(model), [w.name.removesuffix(".weight") for w in find_weights(model)], RANK, sorted(set(names))
    ).eval()

    def each(run: Callable[[Tensor, Any], Any]) -> Callable[[], None]:
        def sequence_by_sequence() -> None:
            for number, name in enumerate(names):
                with moe.expert(name):
                    run(ids[number : number + 1], caches[f"swap{number}"])

        return sequence_by_sequence

    def whole(side: str, call: Pass, inside: Callable[[], AbstractContextManager[Any]]) -> tuple[Any, Any]:
        def prompts() -> None:
            with inside():
                _prompts(call, ids)

        def tokens() -> None:
            with inside():
                _tokens(call, ids, caches[side], new)

        return prompts, tokens

    @contextmanager
    def assigned() -> Iterator[None]:
        with moe.mixed() as run:
            run.assign(names)
            yield

    new = 2 if settings.quick else NEW
    caches: dict[str, Any] = {}
    with torch.no_grad():
        caches |= {side: _prompts(model, ids) for side in ("dense", "mixed", "lora")}
        caches |= {f"swap{i}": _prompts(model, ids[i : i + 1]) for i in range(SEQUENCES)}
        sides = {
            "dense": whole("dense", model, nullcontext),
            "mixed": whole("mixed", model, assigned),
            "swap": (
                each(lambda some, cache: _prompts(model, some)),
                each(lambda some, cache: _tokens(model, some, cache, new)),
            ),
            "lora": whole("lora", partial(lora, adapter_names=names), nullcontext),
        }
        clock = time.perf_counter if is_accelerator(settings.device) else one_clock(torch.get_num_threads())
        seconds = {
            phase: in_turns({side: both[i] for side, both in sides.items()}, settings.rounds, clock=clock)
            for i, phase in enumerate(("prompts", "tokens"))
        }
    return {"seconds": seconds, "error": _error(moe, ids, names), "new": new}


def _prompts(call: Pass, ids: Tensor) -> Any:
    """Read the prompts; what is kept for the next tokens."""
    return call(input_ids=ids, use_cache=True).past_key_values


def _tokens(call: Pass, ids: Tensor, cache: Any, new: int) -> None:
    """Write so many tokens, and leave the cache as it was."""
    last = ids[:, -1:]
    for _ in range(new):
        last = call(input_ids=last, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    cache.crop(-new)


def _error(moe: FreeMoE, ids: Tensor, names: Sequence[str]) -> float:
    """The largest difference of logits from those of every sequence by itself, over the largest logit.

    Raises:
        NumericError: It is larger than the type's rounding explains.
    """
    with torch.no_grad():
        alone = torch.cat([moe(ids[i : i + 1], expert=name).logits for i, name in enumerate(names)]).float()
        found = moe(ids, expert=list(names), strategy="fused").logits.float()
    error = float((found - alone).abs().max() / alone.abs().max())
    if not error <= (1e-4 if moe.model.dtype == torch.float32 else 0.1):
        raise NumericError(f"A mixed batch is {error:.1e} of the largest logit away from its sequences by themselves.")
    return error


def _figures(label: str, found: dict[str, Any], accelerated: bool) -> list[Figure]:
    prompts, tokens = found["seconds"]["prompts"], found["seconds"]["tokens"]
    both = {side: [a + b for a, b in zip(prompts[side], tokens[side], strict=True)] for side in prompts}
    speed = SEQUENCES * (PROMPT + found["new"]) / statistics.median(both["mixed"])
    note = f"{speed:.0f} tokens/s; logits differ by {found['error']:.0e}"
    figures = []
    for rival, said, target in (
        ("dense", "the base", OVER_DENSE_THERE if accelerated else OVER_DENSE), ("swap", "a switch per sequence", OVER_SWAP), ("lora", "LoRA r=8", OVER_LORA),
    ):  # fmt: skip
        parts = ", ".join(
            f"{phase} {ratio(seconds, rival, 'mixed'):.2f}x"
            for phase, seconds in (("prompts", prompts), ("tokens", tokens))
        )
        name = f"mixed batch over {said}, {label}"
        figures.append(Figure(name, ratio(both, rival, "mixed"), target, note=f"{parts}; {note}"))
    return figures


def _memory(name: str, moe: FreeMoE) -> Figure:
    """What a mixed batch holds for an expert, over what it takes on disk.

    Raises:
        NumericError: Something is held for an expert that no batch had.
    """
    first, *others = moe.experts
    fresh = FreeMoE(moe.model, [moe.described(expert) for expert in moe.experts])
    with fresh.mixed() as run:
        run.assign([first])
    if any(fresh.mixed_bytes(other) for other in others):
        raise NumericError("Memory is held for an expert that was not used yet.")
    disk = sum(t.numel() * t.element_size() for t in moe.described(first).to_tensors().values())
    held = fresh.mixed_bytes(first)
    return Figure(
        f"memory per expert over its bytes on disk, {name}", held / disk, None if name == "bundled" else MOST_MEMORY,
        "lower", note=f"{held / 1e6:.2f} MB; 0 before its first use",
    )  # fmt: skip
