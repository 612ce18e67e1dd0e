"""What a trim begins with: its base, and its text, read, cut into the three parts that never mix, packed into blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from freemoe.assets import demo_documents
from freemoe.core.environment import use_threads
from freemoe.core.errors import DataError
from freemoe.core.files import json_digest
from freemoe.evals.seen import SeenHashes
from freemoe.hookmoe.plans.apply import probe_router_k
from freemoe.hookmoe.plans.compare import read_variants
from freemoe.hookmoe.plans.layers import require_plain
from freemoe.hookmoe.plans.methods import check_asked
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.models.checkpoints.identity import SETTINGS
from freemoe.models.checkpoints.loading import load_base, load_config
from freemoe.text.blocks import PackedBlocks, cut_passages, join_passages, pack_blocks, split_passages
from freemoe.text.documents import read_documents

DEMO = "demo:"
"""The bundled world's documents, drawn anew: what the bundled mixture was trained on, but not the same documents."""


@dataclass(frozen=True)
class TextParts:
    """Blocks by what they are for."""

    train: PackedBlocks  # Hooks are trained on these
    held_out: PackedBlocks  # Searches and training look at these
    test: PackedBlocks  # Are reported, and decide nothing
    passages: tuple[int, int, int]  # Passages of each part, in the same order
    questions: SeenHashes = field(default_factory=SeenHashes)  # Hashes of the questions of rows that ask one


def load_text(recipe: TrimRecipe, tokenizer: Any) -> TextParts:
    """Read, divide by content, and pack; each part is cut to its limit after a seeded shuffle.

    Raises:
        DataError: No text, or a part that is shorter than one block.
    """
    if recipe.text == DEMO:
        documents = demo_documents()
    else:
        documents = read_documents(recipe.text, tokenizer, recipe.chat, recipe.group_by)
    parts = split_passages(cut_passages(documents), seed=recipe.seed)
    training = recipe.training
    wanted = {"train": training.limit, "held_out": training.held_out, "test": training.test}
    packed, contiguous = {}, training.samples == "contiguous"
    for name, most in wanted.items():
        texts = join_passages(getattr(parts, name)) if contiguous else getattr(parts, name)
        blocks = pack_blocks(tokenizer, texts, training.block, f"{name} part of the text", contiguous)
        if len(blocks) > most:
            order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(recipe.seed))
            blocks = blocks.select_rows(order[:most].sort().values)
        packed[name] = blocks
    sizes = len(parts.train), len(parts.held_out), len(parts.test)
    return TextParts(**packed, passages=sizes, questions=SeenHashes.from_questions(parts.seen_questions()))


def prepare_trim(recipe: TrimRecipe) -> tuple[Any, Any, TextParts]:
    """Load base, tokenizer and text and check what can be checked before anything is trained.

    Raises:
        FamilyError: A dense base, or a router whose k does not act.
        RecipeError: A plan that the base cannot run, or a hook where no mixture is.
        DataError: No tokenizer, or a text that is too short.
    """
    use_threads(recipe.threads)
    require_plain(recipe.model, load_config(recipe.model, recipe.revision))
    model, tokenizer = load_base(recipe.model, recipe.revision, recipe.dtype, recipe.device)
    if tokenizer is None:
        raise DataError(
            f"The base {recipe.model!r} has no tokenizer, and a trim reads text. Save one beside the model."
        )
    check_asked(model, recipe)
    read_variants(recipe.plan.compare, model)
    probe_router_k(model)
    return model, tokenizer, load_text(recipe, tokenizer)


def input_digests(base_print: str, settings: Mapping[str, Any], text: TextParts) -> dict[str, str]:
    """What a trim reads; a resumed one must read the same, and so must its workers."""
    parts = {"train": text.train, "held-out": text.held_out, "test": text.test}
    digests = {f"{n} text": json_digest(b.ids.tolist()) for n, b in parts.items()}
    return {"base model": base_print, SETTINGS: json_digest(settings), **digests}
