"""The papers' own methods on the real model: bands by Algorithm 1 (MoDE, Free-MoE), and gates by `profile: paper` (ToMoE).

HookMoE's is `mixtures.trimmed` with ``profile: paper``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from benchmarks.real_llm.cells import BASE
from benchmarks.real_llm.methods.mixtures import EXPERTS, common_fields, files_of
from benchmarks.real_llm.methods.weights import Stand, per_document, products
from benchmarks.real_llm.protocol import Job
from freemoe.core.files import write_atomic
from freemoe.core.run.execute import open_run
from freemoe.core.run.progress import QuietProgress
from freemoe.domain_experts.rank.bands import BandRankings, band_grid
from freemoe.domain_experts.rank.calibrate import calibrate
from freemoe.domain_experts.recipe import BandSection, BuildRecipe
from freemoe.evals.text_score import score_text
from freemoe.models.switching import switched_off
from freemoe.text.blocks import pack_blocks
from freemoe.text.files import evenly_spaced
from freemoe.tomoe.gates.discretize import structure_of
from freemoe.tomoe.gates.train import GateTrainer
from freemoe.tomoe.material import ConversionContext, prepare_context
from freemoe.tomoe.recipe import ConvertRecipe
from freemoe.tomoe.structures.masked import apply_structure
from freemoe.tomoe.structures.methods import search_structure
from freemoe.tomoe.structures.structure import Structure, active_share
from freemoe.training.loop import TrainingCheckpoints, run_training_loop

BANDS = ("p2", "pinf", "p1", "p4", "p2-16x16", "p2-4x4")
"""Rankings: the norm's p, and the side of the patches."""
WIDTH = 0.1
"""Of a band, and from band to band: the width of Tables 2 (MMLU) and 5."""
STEP_TOKENS, LENGTH, TEST_BLOCKS = 512, 2048, 8
"""Tokens of a step of gates, for the paper's 2,048; tokens of a block of WikiText-2's test text, and how many of them."""
_HELD_OUT, _STATISTICS = 4096, 8192


def band_section(method: str) -> BandSection:
    """The bands of a ranking by the papers' rule: `profile: paper` of `freemoe build`, of another width."""
    p, _, patch = method.removeprefix("p").partition("-")
    paper = BuildRecipe.model_validate({"model": "-", "domains": {"any": ["demo:code"]}, "profile": "paper"}).bands
    return paper.model_copy(update={"p": p, "patch": int(patch.partition("x")[0] or 1), "ratio": WIDTH, "step": WIDTH})


def banded(stand: Stand) -> dict[str, Any]:
    """Every band of a ranking on the whole reference and on the reported documents; of the base these alone.

    Returns:
        ``bands``: by name the mean figure on either; ``chosen`` and ``oracle``: the best by the one and by the other, whether or
        not it beats the base, with what the model does under it on every reported document.
    """
    data, cell = stand.data, stand.cell
    reference = [*data.gradient, *data.stop, *data.guard]

    def scored() -> tuple[list[float], dict[str, list[float]]]:
        own, shown = stand.scores(reference), stand.scores(data.reported)
        means = [sum(s.value for s in part) / len(part) for part in (own, shown)]
        return means, per_document(data.kind, shown)

    facts = {"kind": data.kind, "ids": [d.id for d in data.reported], "keys": [d.key for d in data.reported]}
    facts |= {"reference": len(reference), "notes": list(data.notes)}
    if cell.method == BASE:
        means, shown = scored()
        return {**facts, "means": means, **shown}
    section = band_section(cell.method)
    with products(stand.protocol.score):
        norms = calibrate(stand.model, stand.weights, ((b.ids, b.mask, b.labels) for b in stand.batches(reference)), 1)
    bands = band_grid(section, "wanda", 0)
    rankings = BandRankings(stand.weights, lambda tap: norms.input_norm(tap, 0, float(section.p)), bands)
    found = {}
    for band in bands:
        with switched_off(stand.weights, rankings.mask_of_band(band)):
            found[band.name] = scored()
    best = {
        name: max(found, key=lambda band, side=side: found[band][0][side])
        for side, name in enumerate(("chosen", "oracle"))
    }
    return {
        **facts,
        "bands": {name: means for name, (means, _) in found.items()},
        **{name: {"band": band, **found[band][1]} for name, band in best.items()},
    }


# ------------------------------------------------------------------------------------------- gates


def gated(job: Job) -> dict[str, Any]:
    """Train gates for the cell's steps by its profile (``dense``: none), then score WikiText-2's test text.

    A cell that was killed goes on where it was. Under ``paper`` neither rate nor budget depends on the number of steps, so that
    training begins with a shorter one's state.

    Returns:
        ``nll``, ``right``, ``tokens`` per block, ``share`` of the weights that a token uses.
    """
    cell, small = job.cell, job.protocol.schedule.steps < 10
    train = {"steps": cell.documents, "save_every": max(1, cell.documents), "statistics_tokens": _STATISTICS}
    train |= {"batch_tokens": STEP_TOKENS, "block": STEP_TOKENS, "evaluation_tokens": _HELD_OUT}
    if small:
        train |= {"batch_tokens": 128, "block": 64, "evaluation_tokens": 256, "statistics_tokens": 256}
    recipe = ConvertRecipe.model_validate(
        {
            "model": job.model,
            "text": [str(files_of(job)[0])],
            "active": cell.budget or 1.0,
            "experts": EXPERTS,
            "profile": "paper" if cell.method == "paper" else "default",
            "train": train,
            **common_fields(job, Path(job.tensors).with_suffix("")),
            "dtype": job.protocol.train,
        }
    )
    with open_run(recipe, overwrite=True) as run:
        context = prepare_context(recipe, run, QuietProgress())
        structure = _structure(context, job)
        blocks = pack_blocks(context.tokenizer, [files_of(job)[1].read_text(encoding="utf-8")], 64 if small else LENGTH)
        blocks = blocks.select_rows(evenly_spaced(len(blocks), TEST_BLOCKS))
        with apply_structure(context.model, structure, context.sublayers):
            score = score_text(context.model, blocks)
        shutil.rmtree(run.partial)
    share = active_share(structure, context.sublayers)
    return {**score.sums(), "share": share, "training": train}


def _structure(context: ConversionContext, job: Job) -> Structure:
    if job.cell.method != "paper":
        return search_structure(context)[0]
    trainer = GateTrainer(context.model, context.sublayers, context.recipe, context.train)
    for _, path in job.needs:
        trainer.load_state(load_file(path))
    kept = TrainingCheckpoints(context.own_run, "state", trainer.to_state, trainer.load_state)
    steps = job.cell.documents
    run_training_loop(lambda n: trainer.train_until(n + 1), lambda _: False, steps, steps, checkpoints=kept)
    write_atomic(Path(job.tensors), save({n: t.contiguous() for n, t in trainer.to_state().items()}))
    return structure_of(trainer, context.held_out)
