"""Write an expert of units as a plain smaller checkpoint: loaded, switched in, cut out, checked, saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from freemoe.core.errors import ArtifactError, NumericError
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.structured.shrink import shrink
from freemoe.domain_experts.structured.units import find_units
from freemoe.models.checkpoints.saving import require_free, save_checkpoint, whole_or_nothing

# Largest difference of logits, relative to the largest logit, that another order of sums may make.
_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-6}
_CLOSE_HALF = 0.1


def write_shrunk(moe: FreeMoE, expert: str, folder: str | Path, *, pad: bool = False, overwrite: bool = False) -> Path:
    """Write one expert of units, or a combination of several, as a plain smaller Hugging Face checkpoint with its tokenizer.

    The units are cut out; single switches of the expert are zeros in it. Its logits are compared with those of the expert
    on the full base before anything is written. With ``pad`` every layer of the layout ``free`` is filled up to the largest
    with zeros.

    Raises:
        ArtifactError: The expert has no units, or the folder cannot be written.
        RecipeError: Layers are left with different numbers of units.
        FamilyError: The family's plain configuration cannot say what is left.
    """
    target = Path(folder)
    require_free(target, overwrite)
    chosen = moe.described(expert)
    require_units(expert, chosen.kind)
    assert chosen.unit is not None
    units = find_units(moe.model, chosen.unit)
    with moe.expert(expert), torch.no_grad():
        small = shrink(moe.model, units, units.of_lines(chosen.lines), pad=pad)
        _require_equal(moe.model, small)
    with whole_or_nothing(target) as partial:
        save_checkpoint(small, partial)
        if moe.tokenizer is not None:
            moe.tokenizer.save_pretrained(partial)
    return target


def require_units(expert: str, kind: str) -> None:
    """Raise unless an expert is one of whole units.

    Raises:
        ArtifactError: Nothing of it can be cut out.
    """
    if kind != "unit":
        raise ArtifactError(
            f"Expert {expert!r} is of kind {kind!r}: no whole units are off, so that nothing can be cut out. Build with "
            "--unit neuron, or merge without --shrink."
            + (
                " The guard found no reliable gain; --select argmax takes the units all the same."
                if kind == "base"
                else ""
            )
        )


def _require_equal(model: Any, small: Any) -> None:
    """Raise unless two models give the same logits: what a family does by layer number is beyond any description."""
    entries = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(entries, (1, 32), generator=generator).to(model.device)
    wanted, seen = (m(input_ids=ids, use_cache=False).logits.float() for m in (model, small))
    apart = float((wanted - seen).abs().max() / wanted.abs().max())
    if not apart <= _CLOSE.get(model.dtype, _CLOSE_HALF):
        raise NumericError(
            f"The smaller {type(model).__name__} does not compute what the expert does: logits differ by {apart:.1%} of the "
            "largest. Nothing was written. This family treats layers or heads by their number; use another --unit."
        )
