"""An artefact of experts: opened, described, evaluated."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from freemoe.core.artifacts import describe_artefact
from freemoe.core.errors import DataError
from freemoe.domain_experts.expert import read_experts
from freemoe.domain_experts.hosting.summary import read_measurements
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.purify.batches import answer_batches
from freemoe.domain_experts.purify.curvature import measure_curvature
from freemoe.domain_experts.purify.curvature import super_weights as largest_disturbances
from freemoe.domain_experts.route.reading import read_router
from freemoe.evals.engine.tokens import context_length
from freemoe.evals.held_out import read_shared
from freemoe.hub.fetch import HubAccess
from freemoe.models.checkpoints.gguf_header import gguf_origin
from freemoe.models.checkpoints.identity import require_base
from freemoe.models.checkpoints.loading import load_base, load_tokenizer
from freemoe.models.checkpoints.placement import Placement
from freemoe.models.weights import describe_weights, find_weights
from freemoe.recipes.expert_names import BASE
from freemoe.text.files import read_text_file

# Tokens per block, per batch and in all: what a curvature needs is two vectors per matrix.
_BLOCK, _BATCH, _MOST = 256, 2048, 8192

PASSAGE = """\
The harbour of the small town lies behind a wall of grey stone that was built when ships still came for salt. In the morning
the boats return, one after another, and the first buyers are already waiting on the pier with their baskets and their scales.
Nobody talks much before the coffee is ready. When the sun stands above the church, the fish are sold, the nets are hung up to
dry, and the fishermen walk home along the river.

Water is a strange substance. Most liquids shrink when they freeze, but water grows by about nine per cent, and so ice floats. If
it did not, lakes would freeze from the bottom upwards, and few fish would live through a long winter. The reason lies in the
shape of the molecule: its two hydrogen atoms form an angle, and in the crystal every molecule holds four others at a distance.

"How many eggs do we need?" asked Anna. Her brother counted the guests on his fingers. "There are twelve of us, and everybody
eats two, so twenty-four. We have ten. Buy another fourteen, or better sixteen, because one always breaks." She wrote the number
on a piece of paper, took the bag from its hook and went out, leaving the door open behind her.

To sort a list of numbers, a program can take the first of them, put all smaller ones on its left and all larger ones on its
right, and then do the same with both sides. def smaller(numbers, limit): return [n for n in numbers if n < limit]. On average
the work grows only a little faster than the length of the list.

In 1854 a doctor marked every death of an epidemic on a map of his city. Around one pump the marks stood close together, and he
persuaded the council to remove its handle. The map did not explain the disease, but it showed where to look, and that was enough.
"""
"""Ordinary English of several kinds, some 330 words: what super weights are measured on where no text is given."""


def load_artefact(folder: Path, base: str | None, dtype: str, device: Placement, access: HubAccess) -> FreeMoE:
    """Open the experts on their base, or on a given one, to answer with."""
    return FreeMoE.from_pretrained(base, folder, dtype=dtype, device=device, **access.for_base())


def inspect_artefact(folder: Path, base: str | None = None) -> dict[str, Any]:
    """Check an artefact, open all its files and describe its experts; with a base, also count what each switches off.

    Raises:
        ArtifactError: When it is damaged, cannot be read, or was made for another base.
    """
    manifest = read_shared(folder)
    held = read_experts(folder, manifest)
    router = read_router(folder, manifest, held)
    weights = None
    if base is not None:
        model, tokenizer = load_base(base)
        require_base(manifest, model, tokenizer)
        weights = find_weights(model)
    known = read_measurements(folder)
    experts = []
    for expert in held:
        about = known.get(expert.name, {})
        gain = about.get("gain") or {}
        row = {
            "name": expert.name,
            "kind": expert.kind,
            "rule": expert.band.name if expert.band else None,
            "bytes": sum(t.numel() * t.element_size() for t in expert.to_tensors().values()),
            # What the build found: whether it was accepted, its gain on the test split with a 95 % interval, and why.
            "accepted": False if expert.kind == BASE else about.get("accepted"),
            **{f"gain_{end}" if end != "mean" else "gain": gain.get(end) for end in ("mean", "low", "high")},
            "gain_unit": gain.get("unit"),
            "verdict": about.get("verdict"),
        }
        if weights is not None:
            mask = expert.mask(weights)
            row |= {"off": mask.count, "off_share": float(mask.off_share(weights))}
        experts.append(row)
    return {
        **describe_artefact(folder, manifest, base),
        "experts": experts,
        "router_domains": list(router.domain.classes) if router else [],
        "router_abstains_below": router.threshold if router else None,
    }


def inspect_model(model: str, *, super_weights: bool = False, text: Path | None = None) -> dict[str, Any]:
    """What freemoe finds in a base: its family and the weights that can be switched off.

    Its super weights too, by `curvature.super_weights`, where they are asked for: measured on the first few thousand tokens
    of a UTF-8 file ``text``, or on `PASSAGE`.

    Raises:
        DataError: For super weights, when the model has no tokenizer, or the text is missing or shorter than two tokens.
    """
    words = PASSAGE if text is None else read_text_file(text)
    if super_weights:
        # Says what is wrong, and before the weights are loaded.
        load_tokenizer(model)
    base, tokenizer = load_base(model)
    found = {
        "model": model,
        "kind": "model",
        **describe_weights(base),
        "dtype": str(base.dtype).removeprefix("torch."),
        **({"origin": said} if (said := gguf_origin(model)) else {}),
        "vocabulary_tokens": None if tokenizer is None else len(tokenizer),
    }
    return found | _super_weights(base, tokenizer, words, text) if super_weights else found


def _super_weights(base: Any, tokenizer: Any, words: str, text: Path | None) -> dict[str, Any]:
    # Plain text in blocks, every token of which is predicted from those before it.
    ids = tokenizer(words)["input_ids"][:_MOST]
    length = min(_BLOCK, context_length(base, tokenizer))
    blocks = [tuple(ids[i : i + length]) for i in range(0, len(ids), length)]
    rows = [(b[:-1], b[1:]) for b in blocks if len(b) > 1]
    if not rows:
        name = "the built-in passage" if text is None else str(text)
        raise DataError(f"{name} has {len(ids)} tokens; a loss needs at least 2. Give a longer text with --text.")
    batches = answer_batches(rows, [0] * len(rows), _BATCH, base.device)
    weights = find_weights(base)
    found = largest_disturbances(measure_curvature(base, weights, batches), weights)
    return {
        "measured_on": "a built-in passage" if text is None else str(text),
        "tokens": sum(int(b.mask.sum()) for b in batches),
        "disturbance": "w^2 h / 2, nats per token; times: cost |w| sqrt(h) over the median weight's",
        "super_weights": [asdict(w) for w in found],
    }
