"""Train the tiny mixture of experts that comes with the package, from a seed: Mixtral's shape, the demo model's world.

    python -m scripts.make_demo_moe --dry-run
    python -m scripts.make_demo_moe --seed 5 --out FOLDER

Tokenizer, documents and the weight of each token in the loss are those of `make_demo_model`; what is new is the router, which a
balance loss keeps from sending every token to the same experts.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from scripts.make_demo_model import (
    ASSETS,
    MAX_POSITIONS,
    TOKENS_PER_STEP,
    VOCABULARY,
    WEIGHT_DECAY,
    batches,
    begin,
    parse_flags,
    provenance,
    rows,
    save,
    train,
    train_tokenizer,
)
from scripts.tiny_world import WORLD_SEED, TrainingMix, World

SEED, STEPS = 5, 1200
SECONDS_PER_STEP = 0.4  # one thread of a server core with AVX2, unshared; only for the estimate of --dry-run
LEARNING_RATE, BALANCE = 4e-3, 0.02
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
    pools = rows(world.documents(seed, TrainingMix()), tokenizer, rng)
    tokens = train(model, batches(pools, tokenizer.pad_token_id, rng), steps, LEARNING_RATE, BALANCE)
    record = provenance(recipe(seed, steps), model, tokens, began)
    # Half precision saves space in the package; on most CPUs it runs several times slower than fp32.
    save(model, tokenizer, record, out, run_in="float32")  # pyright: ignore[reportArgumentType]


def main() -> None:
    """Train and save."""
    args = parse_flags(__doc__, SEED, STEPS, ASSETS / "demo_moe")
    if begin(args, SECONDS_PER_STEP):
        make_moe(args.out, args.seed, args.steps)
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
