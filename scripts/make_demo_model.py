"""Train the tiny model that comes with the package, from seeds: tokenizer, base, provenance, benchmark.

    python -m scripts.make_demo_model --dry-run
    python -m scripts.make_demo_model --seed 11 --eval-seed 7301 --out FOLDER

Another `--seed` gives another base of the same kind: other initial weights, other documents, the same world.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import random
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.tiny_world import WORLD_SEED, TrainingDocument, TrainingMix, World, write_benchmark

ASSETS = Path(__file__).resolve().parents[1] / "src" / "freemoe" / "assets"
SEED, EVAL_SEED, STEPS = 11, 7301, 1900
TOKENS_PER_STEP = 4096
SECONDS_PER_STEP = 0.6  # one thread of a server core with AVX2, unshared; only for the estimate of --dry-run
LEARNING_RATE, WARMUP, WEIGHT_DECAY = 3e-3, 60, 0.05
PROMPT_WEIGHT = 0.1  # what stands in a prompt is random; predicting it would eat the budget
# An answer of math is three or four tokens; at weight 1 it would drown in the long texts of the others.
COMPLETION_WEIGHT = {"math": 3.0, "code": 1.0, "general": 1.0}
PACKED_SHARE = 0.2  # of the rows hold many documents, so that long contexts are not foreign to the model
POOL_DOCUMENTS = 6000  # documents sorted by length at a time, so that little of a batch is padding
MAX_POSITIONS, PACKED_LENGTH = 512, 256
VOCABULARY, TOKENIZER_SEED, TOKENIZER_DOCUMENTS = 512, 0, 20_000
END, PAD = "<|end|>", "<|pad|>"
# A newline, a digit or a punctuation mark is always alone; letters may take the space before them.
SPLIT_PATTERN = r"\n|\p{N}|[^\s\p{L}\p{N}]| ?\p{L}+| +"

Row = tuple[list[int], list[float]]  # token ids, loss weight of each token


def train_tokenizer(world: World) -> Any:
    """The tokenizer of the demo models, trained on documents of their world."""
    parts = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    documents = itertools.islice(world.documents(TOKENIZER_SEED), TOKENIZER_DOCUMENTS)
    return byte_tokenizer((document.text for document in documents), parts, VOCABULARY, MAX_POSITIONS)


def byte_tokenizer(
    texts: Iterable[str], parts: pre_tokenizers.PreTokenizer, vocabulary: int, longest: int
) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on texts; `encode` adds no special token by itself.

    ``parts`` divides a text into what merges stay within; ``longest``: tokens that the model has positions for.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = parts  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """A Llama of about 1.2 million parameters with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=160,
        intermediate_size=432,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.06,  # at the usual 0.02 a model this narrow spends 200 steps more at the start
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def rows(documents: Iterator[TrainingDocument], tokenizer: Any, rng: random.Random) -> Iterator[list[Row]]:
    """Pools of rows; a row is one document from position 0 on, or many joined to `PACKED_LENGTH`."""
    end = tokenizer.eos_token_id
    newline = tokenizer.encode("\n")
    while True:
        pool: list[Row] = []
        packed: Row = ([], [])
        glue = [end]
        for ids, weights in encode(list(itertools.islice(documents, POOL_DOCUMENTS)), tokenizer):
            if rng.random() >= PACKED_SHARE:
                pool.append(([*ids, end], [*weights, 1.0]))
                continue
            if len(packed[0]) + len(ids) + 1 > PACKED_LENGTH:
                pool.append(packed)
                packed = ([], [])
                # Few-shot prompts join examples by an empty line, running text by the end token: show both.
                glue = rng.choice(([end], newline))
            packed = (packed[0] + ids + glue, packed[1] + weights + [1.0] * len(glue))
        if packed[0]:
            pool.append(packed)
        yield pool


def encode(documents: list[TrainingDocument], tokenizer: Any) -> list[Row]:
    """Tokens and loss weights; prompt and completion meet where the benchmark's scorer cuts them."""
    prompts = tokenizer([document.prompt or "\n" for document in documents])["input_ids"]
    wholes = tokenizer([document.text for document in documents])["input_ids"]
    encoded = []
    for document, prompt, whole in zip(documents, prompts, wholes, strict=True):
        length = len(prompt) if document.prompt else 0
        weight = COMPLETION_WEIGHT[document.domain]
        encoded.append((whole, [PROMPT_WEIGHT] * length + [weight] * (len(whole) - length)))
    return encoded


def batches(pools: Iterator[list[Row]], pad: int, rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Right-padded (ids, weights) of rows of similar length, about `TOKENS_PER_STEP` positions each."""
    for pool in pools:
        pool.sort(key=lambda row: len(row[0]))  # stable, so the order is that of the seed
        groups: list[list[Row]] = [[]]
        for row in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(row[0]) > TOKENS_PER_STEP:
                groups.append([])
            groups[-1].append(row)
        # The last group is a rest of any size: a tiny batch would be a noisy step.
        full = groups[:-1] or groups
        rng.shuffle(full)
        for group in full:
            width = len(group[-1][0])
            ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in group])
            weights = torch.tensor([row + [0.0] * (width - len(row)) for _, row in group])
            yield ids, weights


def learning_rate(highest: float, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < WARMUP:
        return highest * (step + 1) / WARMUP
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return highest * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    model: Any,
    stream: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    highest: float = LEARNING_RATE,
    balance: float | None = None,
) -> int:
    """Train in place in fp32, by weighted cross-entropy; return the number of tokens that were not padding.

    Args:
        model: A causal LM.
        stream: Token ids and loss weights, (rows, length) each, padded on the right.
        steps: Of the optimizer.
        highest: Learning rate after the warm-up.
        balance: Weight of a mixture's balance loss; None: the model has none.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    model.train()
    began, tokens, smooth = time.monotonic(), 0, math.nan
    for step in range(steps):
        ids, weights = next(stream)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(highest, step, steps)
        # Attention is causal, so nothing real sees padding; a mask only keeps it out of the balance loss.
        routed = {} if balance is None else {"attention_mask": (weights > 0).long(), "output_router_logits": True}
        out = model(input_ids=ids, use_cache=False, **routed)
        losses = torch.nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        targets = weights[:, 1:].flatten()
        loss = (losses * targets).sum() / targets.sum()
        optimizer.zero_grad(set_to_none=True)
        (loss if balance is None else loss + balance * out.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += int((weights > 0).sum())
        value = float(loss.detach())
        smooth = value if math.isnan(smooth) else 0.95 * smooth + 0.05 * value
        if (step + 1) % 50 == 0 or step + 1 == steps:
            elapsed = time.monotonic() - began
            left = elapsed / (step + 1) * (steps - step - 1)
            print(
                f"step {step + 1}/{steps}  loss {smooth:.3f}  {tokens / elapsed:.0f} tok/s  ETA {left / 60:.1f} min",
                flush=True,
            )
    return tokens


def provenance(recipe: dict[str, object], model: Any, tokens: int, began: float) -> dict[str, object]:
    """What decided a model and what made it, as it stands in PROVENANCE.json; ``began`` by the monotonic clock."""
    return {
        **recipe,
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


def save(
    model: LlamaForCausalLM, tokenizer: Any, record: dict[str, object], out: Path, run_in: str = "bfloat16"
) -> None:
    """Write everything beside `out` first, then swap, so that `out` is never half a model.

    Weights are kept in bfloat16; ``run_in`` is the type that ``dtype="auto"`` gives them when they are loaded.
    """
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(fresh)  # pyright: ignore[reportArgumentType]
    config = json.loads((fresh / "config.json").read_text(encoding="utf-8"))
    (fresh / "config.json").write_text(json.dumps(config | {"dtype": run_in}, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(fresh)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=64,
    ).save_pretrained(fresh)
    (fresh / "PROVENANCE.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for path in fresh.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner only, which would travel into the wheel
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.replace(old)
    fresh.replace(out)
    shutil.rmtree(old, ignore_errors=True)


def recipe(seed: int, eval_seed: int, steps: int) -> dict[str, object]:
    """What decides the base, as it stands in PROVENANCE.json."""
    return {
        "seed": seed,
        "eval_seed": eval_seed,
        "world_seed": WORLD_SEED,
        "steps": steps,
        "tokens_per_step": TOKENS_PER_STEP,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "prompt_weight": PROMPT_WEIGHT,
        "completion_weight": COMPLETION_WEIGHT,
        "mix": {name: dict(values) for name, values in asdict(TrainingMix()).items()},
    }


def make_base(out: Path, seed: int, eval_seed: int, steps: int = STEPS) -> None:
    """Train a base on the threads that torch has, and write `demo_model/` and `benchmark/` into `out`.

    The model is written last and appears whole or not at all, so a folder that has one is finished.
    """
    began = time.monotonic()
    world, mix = World(), TrainingMix()
    tokenizer = train_tokenizer(world)
    model = new_model(tokenizer, seed)
    rng = random.Random(f"rows/{seed}")
    pools = rows(world.documents(seed, mix), tokenizer, rng)
    tokens = train(model, batches(pools, tokenizer.pad_token_id, rng), steps)
    record = provenance(recipe(seed, eval_seed, steps), model, tokens, began)
    write_benchmark(out / "benchmark", eval_seed)
    save(model, tokenizer, record, out / "demo_model")


def parse_flags(
    about: str | None, seed: int, steps: int, out: Path, eval_seed: int | None = None
) -> argparse.Namespace:
    """Flags of the command line; the arguments are their defaults, and a model without a benchmark has no ``eval_seed``."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=seed, help="weights and documents (default %(default)s)")
    if eval_seed is not None:
        parser.add_argument(
            "--eval-seed", type=int, default=eval_seed, help="items of the benchmark (default %(default)s)"
        )
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (default %(default)s)")
    parser.add_argument("--out", type=Path, default=out, help="folder (default: the package's)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    args = parser.parse_args()
    for name in ("steps", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be 1 or more")
    return args


def begin(args: argparse.Namespace, seconds_per_step: float) -> bool:
    """Say how long a training will take; whether it shall be done at all, on the threads that were asked for."""
    estimate = args.steps * seconds_per_step / 60
    millions = args.steps * TOKENS_PER_STEP / 1e6
    print(f"{args.steps} steps x {TOKENS_PER_STEP} tokens = {millions:.1f}M, about {estimate:.0f} min")
    torch.set_num_threads(args.threads)
    return not args.dry_run


def main() -> None:
    """Train, save, and write the benchmark beside the model."""
    args = parse_flags(__doc__, SEED, STEPS, ASSETS, EVAL_SEED)
    if begin(args, SECONDS_PER_STEP):
        make_base(args.out, args.seed, args.eval_seed, args.steps)
        print(f"wrote {args.out / 'demo_model'} and {args.out / 'benchmark'}")


if __name__ == "__main__":
    main()
