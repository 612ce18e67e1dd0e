"""Train the tiny mixture of experts that comes with the package, from a seed: Mixtral's shape, the demo model's world.

    python -m freemoe.assets.tiny_moe --dry-run
    python -m freemoe.assets.tiny_moe --seed 5 --out FOLDER

Tokenizer, documents and the weight of each token in the loss are those of `tiny_base`; what is new is the router, which a
balance loss keeps from sending every token to the same experts.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM

from freemoe.assets.tiny_base import (
    ASSETS,
    MAX_POSITIONS,
    TOKENS_PER_STEP,
    VOCABULARY,
    WARMUP,
    batches,
    rows,
    save,
    train_tokenizer,
)
from freemoe.assets.tiny_world import WORLD_SEED, Mix, World

SEED, STEPS = 5, 1200
SECONDS_PER_STEP = 0.4  # one thread of a server core with AVX2, unshared; only for the estimate of --dry-run
LEARNING_RATE, WEIGHT_DECAY, BALANCE = 4e-3, 0.05, 0.02
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def new_moe(tokenizer: Any, seed: int) -> MixtralForCausalLM:
    """A Mixtral of about 0.9 million parameters with random weights: 4 layers of 8 experts, 2 per token."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        **SHAPE,
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.06,
        router_aux_loss_coef=BALANCE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return MixtralForCausalLM(config)


def rate_at(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return LEARNING_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: MixtralForCausalLM, stream: Iterator[tuple[torch.Tensor, torch.Tensor]], steps: int) -> int:
    """Train in place in fp32, weighted cross-entropy plus balance loss; return the tokens that were not padding."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    model.train()
    began, tokens, smooth = time.monotonic(), 0, math.nan
    for step in range(steps):
        ids, weights = next(stream)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps)
        # The mask keeps padding out of the balance loss; attention would not need it.
        mask = (weights > 0).long()
        out = model(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True)
        losses = torch.nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        targets = weights[:, 1:].flatten()
        loss = (losses * targets).sum() / targets.sum()
        optimizer.zero_grad(set_to_none=True)
        (loss + BALANCE * out.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += int(mask.sum())
        value = float(loss.detach())
        smooth = value if math.isnan(smooth) else 0.95 * smooth + 0.05 * value
        if (step + 1) % 50 == 0 or step + 1 == steps:
            elapsed = time.monotonic() - began
            left = elapsed / (step + 1) * (steps - step - 1)
            print(f"step {step + 1}/{steps}  loss {smooth:.3f}  ETA {left / 60:.1f} min", flush=True)
    return tokens


def recipe(seed: int, steps: int) -> dict[str, object]:
    """What decides the model, as it stands in PROVENANCE.json."""
    return {
        "seed": seed,
        "world_seed": WORLD_SEED,
        "steps": steps,
        "tokens_per_step": TOKENS_PER_STEP,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "balance": BALANCE,
        "shape": SHAPE,
    }


def make_moe(out: Path, seed: int, steps: int = STEPS) -> None:
    """Train on the threads that torch has, and write the model's folder ``out``, whole or not at all."""
    began = time.monotonic()
    world = World()
    tokenizer = train_tokenizer(world)
    model = new_moe(tokenizer, seed)
    rng = random.Random(f"rows/{seed}")
    pools = rows(world.documents(seed, Mix()), tokenizer, rng)
    tokens = train(model, batches(pools, tokenizer.pad_token_id, rng), steps)
    record = {
        **recipe(seed, steps),
        "tokens": tokens,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "threads": torch.get_num_threads(),
        "wall_seconds": round(time.monotonic() - began),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    # Half precision saves space in the package; on most CPUs it runs several times slower than fp32.
    save(model, tokenizer, record, out, run_in="float32")  # pyright: ignore[reportArgumentType]


def parse_flags() -> argparse.Namespace:
    """Flags of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED, help="weights and documents (default %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (default %(default)s)")
    parser.add_argument("--out", type=Path, default=ASSETS / "demo_moe", help="folder (default: the package's)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    args = parser.parse_args()
    for name in ("steps", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be 1 or more")
    return args


def main() -> None:
    """Train and save."""
    args = parse_flags()
    estimate = args.steps * SECONDS_PER_STEP / 60
    millions = args.steps * TOKENS_PER_STEP / 1e6
    print(f"{args.steps} steps x {TOKENS_PER_STEP} tokens = {millions:.1f}M, about {estimate:.0f} min")
    if args.dry_run:
        return
    torch.set_num_threads(args.threads)
    make_moe(args.out, args.seed, args.steps)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
