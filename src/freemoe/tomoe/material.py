"""What a conversion works on: the base, its text in parts, and the run that remembers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from freemoe.core.environment import use_threads
from freemoe.core.errors import DataError
from freemoe.core.files import json_digest
from freemoe.core.run.folder import RunFolder
from freemoe.core.run.progress import Progress, QuietProgress
from freemoe.evals.seen import SeenHashes
from freemoe.evals.speed import prompt_lengths
from freemoe.models.checkpoints.identity import SETTINGS
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.sublayers import DecoderSublayers, find_sublayers
from freemoe.text.blocks import PackedBlocks, TextSplits, cut_passages, pack_blocks, split_passages
from freemoe.text.documents import read_documents
from freemoe.text.mixes import read_mix
from freemoe.tomoe.recipe import ConvertRecipe


@dataclass(eq=False)
class ConversionContext:
    """What every step of a conversion works on."""

    recipe: ConvertRecipe
    model: Any
    tokenizer: Any
    sublayers: list[DecoderSublayers]
    train: PackedBlocks
    held_out: PackedBlocks
    test: PackedBlocks
    run: RunFolder | None
    progress: Progress
    questions: SeenHashes = field(default_factory=SeenHashes)

    @property
    def own_run(self) -> RunFolder:
        """The run's folder, which the first of several processes keeps."""
        assert self.run is not None
        return self.run

    @property
    def statistics_blocks(self) -> PackedBlocks:
        """The text of the statistics: the first rows of the training text."""
        return self.train.select_rows(
            range(min(len(self.train), max(1, self.recipe.train.statistics_tokens // self.train.row_length)))
        )


def read_text(recipe: ConvertRecipe, tokenizer: Any) -> TextSplits:
    """The recipe's text in its three parts; conversations by the model's chat template."""
    texts: list[str] = []
    for name in recipe.text:
        texts += cut_passages(read_documents(name, tokenizer, recipe.chat, recipe.group_by))
    if recipe.mix is not None:
        texts += read_mix(recipe.mix, recipe.data_root)
    return split_passages(texts, seed=recipe.seed)


def block_length(recipe: ConvertRecipe, model: Any) -> int:
    """Tokens of a block: the recipe's, else 2048 or the model's whole context.

    Raises:
        DataError: Longer than the model's context.
    """
    context = getattr(model.config, "max_position_embeddings", None) or 2048
    wanted = recipe.train.block or min(2048, context)
    if wanted > context:
        raise DataError(
            f"train.block is {wanted}, and this model's context holds {context} tokens. Choose at most that."
        )
    return wanted


def read_blocks(recipe: ConvertRecipe, model: Any, tokenizer: Any) -> tuple[dict[str, PackedBlocks], TextSplits]:
    """The recipe's text by part, in blocks, and the passages that they are made of.

    Raises:
        DataError: No tokenizer, a block longer than the context, or a text that is too short.
    """
    if tokenizer is None:
        raise DataError(f"{recipe.model!r} has no tokenizer, and text must become tokens. Save one beside the model.")
    length = block_length(recipe, model)
    prompt_lengths(recipe.timing, model, length)  # refused here, before anything is trained
    parts = read_text(recipe, tokenizer)
    blocks = {
        part: pack_blocks(tokenizer, getattr(parts, part), length, f"{part.replace('_', '-')} part of the text")
        for part in ("train", "held_out", "test")
    }
    return blocks, parts


def prepare_context(recipe: ConvertRecipe, run: RunFolder | None, progress: Progress | None) -> ConversionContext:
    """Load the base and the text."""
    use_threads(recipe.threads)
    model, tokenizer = load_base(recipe.model, recipe.revision, recipe.dtype, recipe.device)
    sublayers = find_sublayers(model)
    blocks, parts = read_blocks(recipe, model, tokenizer)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if recipe.train.checkpointing:
        checkpoint_activations(model)
    most = max(1, recipe.train.evaluation_tokens // blocks["train"].row_length)
    for part in ("held_out", "test"):
        blocks[part] = blocks[part].select_rows(range(min(len(blocks[part]), most)))
    questions = SeenHashes.from_questions(parts.seen_questions())
    return ConversionContext(
        recipe,
        model,
        tokenizer,
        sublayers,
        **blocks,
        run=run,
        progress=progress or QuietProgress(),
        questions=questions,
    )


def checkpoint_activations(model: Any) -> None:
    """Let the model make activations again in the backward pass; it must be in training mode for that.

    Dropout that the configuration may ask for is switched off: the base computes as in use.
    """
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:  # an older name of the same
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]


def input_digests(context: ConversionContext, base: str, settings: dict[str, Any]) -> dict[str, str]:
    """What the run reads; a resumed run must read the same."""
    parts = {f"{part} text": json_digest(getattr(context, part).ids.tolist()) for part in ("train", "held_out", "test")}
    return {"base model": base, SETTINGS: json_digest(settings), **parts}
