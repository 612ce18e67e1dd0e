"""Mixtures of the real model: `freemoe convert` with its rivals, and `freemoe trim` on a mixture that was split from it.

Both commands run whole, on WikiText-2's training text, which they divide by content: what they report stands in none of
what trained. A split mixture's routers learn from another file.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save

from benchmarks.harness import result_of
from benchmarks.real_llm.data import MATERIALS
from benchmarks.real_llm.methods.splitting import Split, divide, mixture, train_routers
from benchmarks.real_llm.protocol import Job
from freemoe.core.files import write_atomic
from freemoe.core.memory import peak_memory_bytes
from freemoe.evals.text_score import score_text
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.checkpoints.saving import save_checkpoint
from freemoe.text.blocks import cut_passages, pack_blocks
from freemoe.text.documents import read_documents
from freemoe.tomoe.recipe import ConvertRecipe

BLOCK = 256
CONVERSION = {"steps": 60, "batch_tokens": 1024, "block": BLOCK, "save_every": 15, "evaluation_tokens": 8192}
EXPERTS = 8
"""Of every MLP, in a conversion."""
ROUTERS: dict[str, Any] = {"steps": 40, "rows": 4, "rate": 0.05}
_SHOWN_ROWS = 32


class Sizes(NamedTuple):
    """Experts of a split mixture: all, those of a token, and those of a token after trimming (mean over layers)."""

    experts: int
    full: int
    leaner: int


SIZES, QUICK_SIZES = Sizes(8, 4, 2), Sizes(2, 2, 1)
PAPER_HOOKS = {"steps": 8, "rows": 1, "every": 8, "limit": 8, "held_out": 2, "test": 3, "control": False}
"""Of HookMoE's own way, whose blocks have 2,048 tokens of one article; the paper trains on 512 of them."""
HOOKS = {"steps": 36, "rows": 4, "every": 12, "block": BLOCK, "limit": 144, "held_out": 4, "test": 32}
_UNTIMED = {"rounds": 0}
"""Of both commands: no record keeps their speed."""
_QUICK_STEPS = {"steps": 2, "save_every": 2, "evaluation_tokens": 512, "batch_tokens": 256, "block": 64}
_QUICK_HOOKS = {"steps": 2, "rows": 2, "every": 2, "block": 64, "limit": 8, "held_out": 2, "test": 2}


def _quick(job: Job) -> bool:
    return job.protocol.schedule.steps < 10


def files_of(job: Job) -> tuple[Path, Path]:
    """The text that a command divides, and another that it does not see."""
    own, other = MATERIALS[job.cell.material].files
    return Path(job.root) / own, Path(job.root) / other


def common_fields(job: Job, output: Path) -> dict[str, Any]:
    """What the recipes of all commands say alike."""
    return {"output": str(output), "seed": job.cell.seed, "dtype": "float32", "device": "cpu"}


# ----------------------------------------------------------------------------------------- convert


def converted(job: Job) -> dict[str, Any]:
    """Convert to the cell's share of active weights; rivals see the same text.

    Returns:
        ``scores``: by name per reported block ``nll``, ``right`` and ``tokens``; ``curve``: held-out loss by step.
    """
    from freemoe.tomoe.pipeline import convert

    with tempfile.TemporaryDirectory() as scratch:
        recipe = ConvertRecipe.model_validate(
            {
                "model": job.model,
                "text": [str(files_of(job)[0])],
                "active": job.cell.budget,
                "experts": EXPERTS,
                "train": _QUICK_STEPS if _quick(job) else CONVERSION,
                "timing": _UNTIMED,
                **common_fields(job, Path(scratch) / "out"),
            }
        )
        result = result_of(convert(recipe))
    names = ("nll", "right", "tokens")
    return {
        "scores": {name: {n: score[n] for n in names} for name, score in result["scores"].items()},
        "rivals": result["rivals"],
        "curve": result["held_out_curve"],
        "parameters": result["parameters"],
        "training": recipe.train.model_dump(),
        "experts": EXPERTS,
        "seconds": result["cost"]["wall_seconds"],
        "memory_bytes": result["cost"]["peak_memory_bytes"],
    }


# -------------------------------------------------------------------------------------------- trim


def split(job: Job) -> dict[str, Any]:
    """Split the model into a mixture and train its routers; kept is how it was split.

    Returns:
        ``scores``: of the dense model, and of the mixture with the routers it begins with and with those trained, at k of
        the cell; ``divergence``: of every step in nats per token.
    """
    began = time.perf_counter()
    model, tokenizer = load_base(job.model, dtype="float32", device="cpu")
    # Blocks that routers learn from, and others of the same file that show what they learned.
    blocks = pack_blocks(tokenizer, cut_passages(read_documents(files_of(job)[1])), BLOCK, "the routers' text")
    first = len(blocks) - (1 if _quick(job) else min(_SHOWN_ROWS, len(blocks) // 2))
    train, shown = blocks.select_rows(range(first)), blocks.select_rows(range(first, len(blocks)))
    sizes = QUICK_SIZES if _quick(job) else SIZES
    splits = divide(model, train, sizes.experts, job.cell.seed)
    sparse = mixture(model, splits, sizes.full)
    scores = {"dense": score_text(model, shown), "untrained": score_text(sparse, shown)}
    divergence: list[float] = []
    settings = {**ROUTERS, "steps": 2 if _quick(job) else job.cell.documents or ROUTERS["steps"]}
    routers = train_routers(sparse, model, train, **settings, on_step=divergence.append)
    scores["mixture"] = score_text(sparse, shown)
    kept = {
        f"{name}|{n}": t for n, s in enumerate(splits) for name, t in (("shared", s.shared), ("neurons", s.neurons))
    }
    kept |= {f"router|{n}": r for n, r in enumerate(routers)}
    write_atomic(Path(job.tensors), save({name: t.contiguous() for name, t in kept.items()}))
    return {
        "scores": {n: s.sums() for n, s in scores.items()},
        "divergence": divergence,
        "experts": sizes.experts,
        "k": sizes.full,
        "routers": settings,
        "what": f"half of every MLP's neurons shared, the others divided among {sizes.experts} experts, {sizes.full} per token; "
        "routers alone were trained",
        "seconds": time.perf_counter() - began,
        "memory_bytes": peak_memory_bytes(),
    }


def trimmed(job: Job) -> dict[str, Any]:
    """Trim the split mixture to fewer experts per token, with hooks, and measure it beside what costs nothing.

    Returns:
        ``rows``: of the trim's own table; ``plan``; ``mixture``: what was trimmed.
    """
    from freemoe.hookmoe.pipeline import trim

    ((_, path),) = job.needs
    with tempfile.TemporaryDirectory() as scratch:
        model, tokenizer = load_base(job.model, dtype="float32", device="cpu")
        folder = Path(scratch) / "mixture"
        sizes, tensors = QUICK_SIZES if _quick(job) else SIZES, load_file(path)
        layers = range(sum(name.startswith("router|") for name in tensors))
        splits = [Split(*(tensors[f"{name}|{n}"] for name in ("shared", "neurons", "router"))) for n in layers]
        save_checkpoint(mixture(model, splits, sizes.full), folder)
        tokenizer.save_pretrained(folder)
        del model
        paper = job.cell.method == "paper"
        own: dict[str, Any] = {"plan": {"act": sizes.leaner}}
        if paper:
            # The paper's width beside coarse experts: that of one of them.
            own = {"profile": "paper", "hooks": {"units": splits[0].neurons.shape[1]}}
        training = _QUICK_HOOKS if _quick(job) else PAPER_HOOKS if paper else HOOKS
        recipe = TrimRecipe.model_validate(
            {
                "model": str(folder),
                "text": str(files_of(job)[0]),
                "training": training,
                "timing": _UNTIMED,
                **own,
                **common_fields(job, Path(scratch) / "out"),
                **({"dtype": job.protocol.train} if paper else {}),
            }
        )
        result = result_of(trim(recipe))
    return {
        "rows": result["test"]["rows"],
        "tokens": result["test"]["tokens"],
        "plan": result["plan"],
        "hooks": result["hooks"]["widths"],
        "training": recipe.training.model_dump(),
        "seconds": result["cost"]["wall_seconds"],
        "memory_bytes": result["cost"]["peak_memory_bytes"],
    }
