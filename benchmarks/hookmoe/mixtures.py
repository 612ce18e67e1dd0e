"""Mixtures that nobody made for trimming: the shapes of OLMoE and of Qwen3-MoE, trained from a seed on real text.

    python -m benchmarks.hookmoe.mixtures FOLDER --steps 400

25 million parameters of each stand in its experts, 0.3 million in its embeddings. What is trained on are passages of
WikiText-2, TinyStories, C4 and GSM8K; one passage in seven is kept away from the model and written beside it, as the text that
a trim reads. Both are kept in the user's cache folder.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    OlmoeConfig,
    OlmoeForCausalLM,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.harness import cache_folder
from benchmarks.speed.shapes import shape_of
from freemoe.core.errors import DataError, RecipeError
from freemoe.core.files import json_digest, write_atomic
from freemoe.text.blocks import cut_passages, split_passages
from freemoe.text.documents import read_documents
from scripts.make_demo_model import WEIGHT_DECAY, byte_tokenizer, provenance, save, train

SEED, STEPS = 21, 400
ROWS, LENGTH, VOCABULARY, POSITIONS = 16, 256, 1024, 2048
LEARNING_RATE, BALANCE = 3e-3, 0.02
UNSEEN = 0.14
"""Share of the passages that the mixture never sees."""
TEXTS = (
    "wikitext-2-raw/wikitext2_train_5k.txt",
    "tinystories/tiny_stories_train_excerpt.txt",
    "c4/c4_demo.jsonl",
    "c4/c4_sample_200.jsonl",
    "gsm8k/train.jsonl",
)
"""Below the data root; those that are there are read."""
_ASKED = {"gsm8k/train.jsonl": "completion:"}

SHAPES = ("olmoe", "qwen3_moe")
QUICK_STEPS = 3


def read_text(data_root: Path) -> tuple[list[str], list[str], list[str]]:
    """Passages that a mixture is trained on, passages that it never sees, and the names of the files that were there.

    Raises:
        DataError: None of the files is there.
    """
    found = [name for name in TEXTS if (data_root / name).is_file()]
    if not found:
        raise DataError(f"None of {', '.join(TEXTS)} is below {str(data_root)!r}; a mixture is trained on these.")
    pieces = cut_passages([d for name in found for d in read_documents(f"{_ASKED.get(name, '')}{data_root / name}")])
    # A seed of its own: a trim divides what is unseen here by the same hash.
    parts = split_passages(pieces, held_out=UNSEEN / 2, test=UNSEEN / 2, seed=SEED)
    return parts.train, parts.held_out + parts.test, found


def new_mixture(shape: str, tokenizer: Any, seed: int, quick: bool = False) -> Any:
    """A mixture of one of ``SHAPES`` with random weights."""
    torch.manual_seed(seed)
    config_type, model_type = {
        "olmoe": (OlmoeConfig, OlmoeForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    }[shape]
    config: PretrainedConfig = config_type(
        **shape_of(shape, quick)[1],
        vocab_size=len(tokenizer),
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.04,
        router_aux_loss_coef=BALANCE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model_type(config)  # pyright: ignore[reportArgumentType]


def batches(tokenizer: Any, texts: Sequence[str], seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and loss weights, (``ROWS``, ``LENGTH``) each: passages one behind the other, in an order of the seed."""
    coded = tokenizer(list(texts), verbose=False)["input_ids"]
    rng = random.Random(f"mixtures/{seed}")
    while True:
        rng.shuffle(coded)
        ids = torch.tensor([t for passage in coded for t in (*passage, tokenizer.eos_token_id)])
        rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
        order = list(range(len(rows)))
        rng.shuffle(order)
        for start in range(0, max(1, len(order) - ROWS + 1), ROWS):
            some = rows[order[start : start + ROWS]]
            yield some, torch.ones_like(some, dtype=torch.float32)


def recipe(shape: str, seed: int, steps: int, quick: bool, text: str) -> dict[str, object]:
    """What decides a mixture, as it stands in PROVENANCE.json."""
    return {
        "mixture": shape,
        "shape": shape_of(shape, quick)[1],
        "seed": seed,
        "steps": steps,
        "tokens_per_step": ROWS * LENGTH,
        "vocabulary": VOCABULARY,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "balance": BALANCE,
        "unseen": UNSEEN,
        "text": text,
    }


def folder_of(cache: Path, shape: str, steps: int = STEPS, quick: bool = False) -> Path:
    """Where a mixture is kept: ``model/``, and ``unseen.jsonl``, the text that it never saw."""
    return cache / "bench" / f"mixture-{shape}-seed{SEED}-steps{steps}{'-quick' if quick else ''}"


def kept(folder: Path) -> dict[str, Any] | None:
    """The provenance of a mixture that is there; None where there is none."""
    record = folder / "model" / "PROVENANCE.json"
    if not record.is_file() or not (folder / "unseen.jsonl").is_file():
        return None
    return json.loads(record.read_text(encoding="utf-8"))


def best_kept(cache: Path, shape: str, quick: bool = False) -> Path | None:
    """The folder of the mixture of a shape that was trained longest; None where none is kept."""
    folders = sorted((cache / "bench").glob(f"mixture-{shape}-seed*"))
    found = [(kept(f), f) for f in folders if f.name.endswith("-quick") == quick]
    return max(((r["steps"], f) for r, f in found if r), key=lambda pair: pair[0], default=(0, None))[1]


def make_mixture(folder: Path, data_root: Path, shape: str, steps: int = STEPS, quick: bool = False) -> Path:
    """Train a mixture on the threads that torch has and write it, unless the folder holds that very one; returns the folder.

    The model is written last, whole or not at all.

    Raises:
        DataError: No text below the data root.
        RecipeError: No such shape.
    """
    if shape not in SHAPES:
        raise RecipeError(f"shape is {shape!r}; allowed: {', '.join(SHAPES)}.")
    began = time.monotonic()
    seen, unseen, names = read_text(data_root)
    wanted = recipe(shape, SEED, steps, quick, json_digest([names, seen, unseen]))
    old = kept(folder)
    if old is not None and all(old.get(key) == value for key, value in json.loads(json.dumps(wanted)).items()):
        return folder
    tokenizer = byte_tokenizer(seen, ByteLevel(add_prefix_space=False), VOCABULARY, POSITIONS)
    model = new_mixture(shape, tokenizer, SEED, quick)
    tokens = train(model, batches(tokenizer, seen, SEED), steps, LEARNING_RATE, BALANCE)
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in unseen)
    write_atomic(folder / "unseen.jsonl", lines.encode())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    sizes = {"expert_parameters": experts, "embedding_parameters": model.get_input_embeddings().weight.numel()}
    record = provenance(wanted, model, tokens, began) | {"files": names} | sizes
    save(model, tokenizer, record, folder / "model", run_in="float32")
    return folder


def main(data_root: Path, steps: int = STEPS, threads: int = 1) -> None:
    """Train a mixture of every shape into the cache folder, on the text below a data folder: ten to twenty minutes each."""
    torch.set_num_threads(threads)
    for shape in SHAPES:
        print(make_mixture(folder_of(cache_folder(), shape, steps=steps), data_root, shape, steps=steps), flush=True)


if __name__ == "__main__":
    typer.run(main)
