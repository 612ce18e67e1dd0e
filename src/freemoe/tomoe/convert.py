"""`convert`: from a recipe to a model whose tokens use a part of the dense model's weights.

Recipe -> text in parts -> where to begin -> training -> structure -> exported model -> scores of it, of the dense model and
of the rivals; this file only puts them in order. Train text trains, held-out text settles K and the rivals' variants, and
test text is only reported.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freemoe import __version__
from freemoe.artifacts import fingerprint, write_manifest
from freemoe.corpora.blocks import Blocks, Parts, pack_blocks, passages, split
from freemoe.corpora.mixes import read_mix
from freemoe.corpora.text import read_documents
from freemoe.errors import DataError, NumericError
from freemoe.families.loading import load_base
from freemoe.families.sublayers import Sublayers, find_sublayers
from freemoe.recipes import ConvertRecipe, dump
from freemoe.runs import Progress, Quiet, RunFolder, digest, environment, peak_memory_bytes, write_atomic
from freemoe.tomoe.card import model_card
from freemoe.tomoe.export import export
from freemoe.tomoe.finish import structure_of
from freemoe.tomoe.masked import masked
from freemoe.tomoe.measure import TextScore, score_text
from freemoe.tomoe.rivals import METHODS, activities, rival
from freemoe.tomoe.start import Worth, clusters, worths
from freemoe.tomoe.structure import (
    Structure,
    active_parameters,
    check,
    dense_parameters,
    from_tensors,
    to_tensors,
    whole,
)
from freemoe.tomoe.train import History, Trainer

_WORTHS = ("qk", "vo", "vo_ranked", "mlp")
# Text for the statistics that training and rivals begin with.
STATISTICS_TOKENS = 65536
# Largest difference of logits between the exported model and masks on the dense one, at float32.
SAME = 1e-3


@dataclass(eq=False)
class Bench:
    """What every step of a conversion works on."""

    recipe: ConvertRecipe
    model: Any
    tokenizer: Any
    sublayers: list[Sublayers]
    train: Blocks
    held_out: Blocks
    test: Blocks
    run: RunFolder
    progress: Progress

    @property
    def statistics(self) -> Blocks:
        """The text of the statistics: the first rows of the training text."""
        return self.train.rows(range(min(len(self.train), max(1, STATISTICS_TOKENS // self.train.length))))


def convert(
    recipe: ConvertRecipe, *, progress: Progress | None = None, overwrite: bool = False, resume: bool = True
) -> Path:
    """Make a dense model a token-level mixture of experts, and say how good it is.

    Args:
        recipe: What to convert, and how.
        progress: Where to report.
        overwrite: Replace a finished folder of the same name.
        resume: Go on with an unfinished run of the same recipe.

    Returns:
        The converted model's folder.

    Raises:
        FreeMoEError: Its child that says what is wrong; no folder named like the output is left half written.
    """
    started = time.time()
    run = RunFolder(recipe.output, recipe.model_dump(mode="json"), overwrite=overwrite, resume=resume)
    try:
        bench = prepare(recipe, run, progress)
    except BaseException:
        run.discard_if_idle()
        raise
    base = fingerprint(bench.model)
    _same_inputs(bench, base)
    structure, history, curve = decide(bench)
    scores = {"dense": _scored(bench, "dense", bench.test, None)}
    scores["converted"] = _scored(bench, "converted", bench.test, structure)
    rivals = _rivals(bench) if recipe.rivals and recipe.method == "tomoe" else {}
    scores |= {name: score for name, (score, _) in rivals.items()}

    folder = run.partial
    result: dict[str, Any] = {
        "format": 1,
        "kind": "converted",
        "freemoe": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": recipe.model_dump(mode="json"),
        "base": {"name": recipe.model, "fingerprint": base, "model_type": bench.model.config.model_type},
        "blocks": {
            "length": bench.train.length,
            **{part: getattr(bench, part).tokens for part in ("train", "held_out", "test")},
        },
        "parameters": counted(bench, structure),
        "layers": [
            {
                "query_dims": int(layer.rotary.spread(own.qk.float()).sum()),
                "value_dims": own.value_width,
                "head_dim": layer.rotary.head_dim,
                "widths": own.widths,
                "union": own.union,
                "width": layer.width,
            }
            for layer, own in zip(bench.sublayers, structure, strict=True)
        ],
        "usage": _usage(bench, structure),
        "scores": {name: score.to_dict() for name, score in scores.items()},
        "rivals": {name: variant for name, (_, variant) in rivals.items()},
        "history": {"columns": list(History.columns), "rows": history},
        "held_out_curve": curve,
        "environment": environment(),
    }
    _export(bench, structure, folder)
    result["cost"] = {
        "wall_seconds": time.time() - started,
        "peak_memory_bytes": peak_memory_bytes(),
        "units_done": run.journal.done,
        "units_reused": run.journal.reused,
        "model_bytes": sum(p.stat().st_size for p in folder.glob("*.safetensors") if p.name.startswith("model")),
    }
    write_atomic(folder / "recipe.yaml", dump(recipe).encode())
    write_atomic(folder / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    write_atomic(folder / "README.md", model_card(result).encode())
    write_manifest(
        folder,
        {
            "kind": "converted",
            "freemoe_version": __version__,
            "base_model_name_or_path": recipe.model,
            "revision": recipe.revision,
            "base_fingerprint": base,
        },
    )
    return run.publish()


def read_text(recipe: ConvertRecipe) -> Parts:
    """The recipe's text in its three parts."""
    texts: list[str] = []
    for name in recipe.text:
        texts += passages(read_documents(Path(name)))
    if recipe.mix is not None:
        texts += read_mix(recipe.mix, recipe.data_root)
    return split(texts, seed=recipe.seed)


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


def prepare(recipe: ConvertRecipe, run: RunFolder, progress: Progress | None) -> Bench:
    """Load the base and the text."""
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    model, tokenizer = load_base(recipe.model, recipe.revision, recipe.dtype, recipe.device)
    sublayers = find_sublayers(model)
    if tokenizer is None:
        raise DataError(f"{recipe.model!r} has no tokenizer, and text must become tokens. Save one beside the model.")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if recipe.train.checkpointing:
        checkpoint_activations(model)
    length = block_length(recipe, model)
    parts = read_text(recipe)
    blocks = {
        part: pack_blocks(tokenizer, getattr(parts, part), length, f"{part.replace('_', '-')} part of the text")
        for part in ("train", "held_out", "test")
    }
    return Bench(recipe, model, tokenizer, sublayers, **blocks, run=run, progress=progress or Quiet())


def checkpoint_activations(model: Any) -> None:
    """Let the model make activations again in the backward pass; it must be in training mode for that.

    Dropout that the configuration may ask for is switched off: the base computes as in use.
    """
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:  # an older name of the same
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def _same_inputs(bench: Bench, base: str) -> None:
    """Write down what the run reads; a resumed run must read the same."""
    now = {"base model": base} | {
        f"{part} text": digest(getattr(bench, part).ids.tolist()) for part in ("train", "held_out", "test")
    }
    then = bench.run.journal.unit("inputs", lambda: now)
    for what, value in now.items():
        if then[what] != value:
            raise DataError(
                f"The unfinished run at {str(bench.run.partial)!r} was started with another {what}. Put it back, or start "
                "over with --no-resume."
            )


def decide(bench: Bench) -> tuple[Structure, list[list[float]], list[dict[str, float]]]:
    """The structure of the recipe's method; for a learned one its history and its curve on held-out text."""
    recipe, run = bench.recipe, bench.run
    if recipe.active == 1:
        return whole(bench.sublayers, recipe.experts), [], []
    if recipe.method != "tomoe":
        return _best_variant(bench, recipe.method)[0], [], []
    trainer = Trainer(bench.model, bench.sublayers, recipe, bench.train)
    if recipe.gates.start == "statistics":
        trainer.begin(_worth(bench))
    curve = _train(bench, trainer)
    best = _best(recipe, curve)
    structure = from_tensors(run.tensors(f"structure|{int(best['step'])}", lambda: _lost(run)))
    check(structure, bench.sublayers)
    return structure, trainer.history.rows, curve


def _lost(run: RunFolder) -> dict[str, Tensor]:
    raise DataError(f"A saved state is missing from {str(run.partial)!r}. Start over with --no-resume.")


def _structure(bench: Bench, trainer: Trainer) -> Structure:
    widths = trainer.widths(bench.recipe.active)
    return structure_of(
        trainer.hypernetwork, trainer.gating, bench.sublayers, widths, bench.model, bench.held_out, trainer.step
    )


def _clusters(bench: Bench) -> list[tuple[Tensor, Tensor]]:
    def work() -> dict[str, Tensor]:
        found = clusters(bench.model, bench.sublayers, bench.statistics, bench.recipe.experts, bench.recipe.seed)
        return {f"{n}.{kind}": t for n, pair in enumerate(found) for kind, t in zip("wb", pair, strict=True)}

    kept = bench.run.tensors("clusters", work)
    return [(kept[f"{n}.w"], kept[f"{n}.b"]) for n in range(len(bench.sublayers))]


def _worth(bench: Bench) -> list[Worth]:
    routers = _clusters(bench)

    def work() -> dict[str, Tensor]:
        with bench.progress.stage("statistics", len(bench.statistics)) as advance:
            found = worths(bench.model, bench.sublayers, bench.statistics, routers, advance)
        return {f"{n}.{kind}": getattr(w, kind) for n, w in enumerate(found) for kind in _WORTHS}

    kept = bench.run.tensors("worth", work)
    return [Worth(*router, *(kept[f"{n}.{kind}"] for kind in _WORTHS)) for n, router in enumerate(routers)]


def _train(bench: Bench, trainer: Trainer) -> list[dict[str, float]]:
    """Train to the end, from the last saved state where there is one; returns the curve on held-out text.

    Only the state of the last mark and the structure of the best one are kept on disk.
    """
    recipe, run = bench.recipe, bench.run
    steps, every = recipe.train.steps, recipe.train.save_every
    marks = [0, *range(every, steps, every), *([steps] if steps else [])]
    kept = max((m for m in marks if f"held-out|{m}" in run.journal), default=-1)
    curve: list[dict[str, float]] = []
    with bench.progress.stage("training", steps) as advance:
        for mark in marks:
            if mark < kept:
                curve.append(run.journal.unit(f"held-out|{mark}", dict))
                continue

            def work(mark: int = mark) -> dict[str, Tensor]:
                trainer.run(mark, lambda: advance(1))
                return trainer.state()

            state = run.tensors(f"state|{mark}", work)
            if trainer.step < mark:
                trainer.load(state)
                advance(mark)
            tensors = run.tensors(f"structure|{mark}", lambda: to_tensors(_structure(bench, trainer)))
            point = run.journal.unit(
                f"held-out|{mark}", lambda t=tensors, m=mark: _on_held_out(bench, m, from_tensors(t))
            )
            curve.append(point)
            _forget(bench, curve)
            if mark:
                latest = dict(zip(History.columns, trainer.history.rows[-1], strict=True))
                bench.progress.say(
                    f"step {mark}: active {latest['active']:.3f}, KL {latest['distillation']:.4f}, balance "
                    f"{latest['balance']:.3f}, held-out perplexity {point['perplexity']:.3f} at {point['active']:.3f} active"
                )
    return curve


def _best(recipe: ConvertRecipe, curve: list[dict[str, float]]) -> dict[str, float]:
    """The saved state that is best on held-out text among those within the budget; the last where none is."""
    within = [point for point in curve if point["active"] <= 1.01 * recipe.active]
    return min(within, key=lambda point: point["perplexity"]) if within else curve[-1]


def _forget(bench: Bench, curve: list[dict[str, float]]) -> None:
    """Delete the states before the last, and every structure that is not the best."""
    best = _best(bench.recipe, curve)["step"]
    for point in curve:
        if point["step"] != best:
            bench.run.drop(f"structure|{int(point['step'])}")
        if point is not curve[-1]:
            bench.run.drop(f"state|{int(point['step'])}")


def _on_held_out(bench: Bench, step: int, structure: Structure) -> dict[str, float]:
    with masked(bench.model, structure, bench.sublayers):
        score = score_text(bench.model, bench.held_out)
    share = active_parameters(structure, bench.sublayers) / dense_parameters(bench.sublayers)
    return {"step": step, "perplexity": score.perplexity, "accuracy": score.accuracy, "active": share}


def _scored(bench: Bench, name: str, blocks: Blocks, structure: Structure | None, part: str = "test") -> TextScore:
    def work() -> dict[str, Any]:
        place = masked(bench.model, structure, bench.sublayers) if structure is not None else contextlib.nullcontext()
        with place, bench.progress.stage(f"{name} on {part} text", len(blocks)) as advance:
            return score_text(bench.model, blocks, on_rows=advance).to_dict()

    return TextScore.from_dict(bench.run.journal.unit(f"score|{part}|{name}", work))


def _best_variant(bench: Bench, method: str) -> tuple[Structure, dict[str, float]]:
    """A rival with the attention whole and with the attention pruned like the rest: the better on held-out text."""
    routers = _clusters(bench)
    activity = activities(bench.model, bench.sublayers, bench.statistics, routers)
    found = []
    for attention in (1.0, bench.recipe.active):
        structure = rival(method, bench.sublayers, activity, routers, bench.recipe.active, attention)
        score = _scored(bench, f"{method}, attention {attention:g}", bench.held_out, structure, "held-out")
        found.append((score.perplexity, attention, structure))
    _, attention, structure = min(found, key=lambda entry: entry[0])
    share = active_parameters(structure, bench.sublayers) / dense_parameters(bench.sublayers)
    return structure, {"attention": attention, "active": share}


def _rivals(bench: Bench) -> dict[str, tuple[TextScore, dict[str, float]]]:
    found = {}
    for method in METHODS:
        structure, variant = _best_variant(bench, method)
        found[method] = (_scored(bench, method, bench.test, structure), variant)
    return found


def counted(bench: Bench, structure: Structure) -> dict[str, Any]:
    """Parameters of the decoder's linears and of the whole model, nominal and real.

    Nominal counts a value dimension that a token masks as saved, as the paper does; real counts only what need not be
    read or multiplied at run time: token-wise V/O masks save nothing there.
    """
    dense = dense_parameters(bench.sublayers)
    nominal = active_parameters(structure, bench.sublayers)
    real = nominal + sum(
        layer.hidden * (layer.heads + layer.kv_heads) * (layer.rotary.head_dim - own.value_width)
        for layer, own in zip(bench.sublayers, structure, strict=True)
        if not isinstance(own.vo, Tensor)
    )
    gates = sum(t.numel() for name, t in to_tensors(structure).items() if "router" in name or ".vo." in name)
    total = sum(p.numel() for p in bench.model.parameters())
    return {
        "dense_linears": dense,
        "active_linears": nominal,
        "active_share": nominal / dense,
        "active_share_at_run_time": (real + gates) / dense,
        "total": total,
        "active_total": total - dense + nominal,
        "active_share_with_embeddings": (total - dense + nominal) / total,
        "gates": gates,
    }


@torch.no_grad()
def _usage(bench: Bench, structure: Structure) -> list[list[float]]:
    """Per layer the share of held-out tokens that each expert gets."""
    from freemoe.kernels.gates import route

    counts = [torch.zeros(len(own.experts)) for own in structure]

    def listen(n: int) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            own = structure[n]
            expert = route(
                args[0].flatten(0, -2), own.router_weight.to(args[0].device), own.router_bias.to(args[0].device)
            )
            counts[n].add_(torch.bincount(expert.cpu(), minlength=len(own.experts)))

        return hook

    with masked(bench.model, structure, bench.sublayers), contextlib.ExitStack() as stack:
        for n, layer in enumerate(bench.sublayers):
            stack.callback(layer.up[0].register_forward_pre_hook(listen(n)).remove)
        score_text(bench.model, bench.held_out.rows(range(min(8, len(bench.held_out)))))
    return [(c / c.sum()).tolist() for c in counts]


def _export(bench: Bench, structure: Structure, folder: Path) -> None:
    """Write the model, load it again and hold it against the masks on the dense one."""
    from transformers import AutoModelForCausalLM

    export(bench.model, structure, folder, mode=bench.recipe.mode, tokenizer=bench.tokenizer)
    ids = bench.test.ids[:1].to(bench.model.device)
    with torch.no_grad(), masked(bench.model, structure, bench.sublayers):
        wanted = bench.model(ids, use_cache=False).logits.float()
    loaded = AutoModelForCausalLM.from_pretrained(folder).to(bench.model.device).eval()
    with torch.no_grad():
        found = loaded(ids, use_cache=False).logits.float()
    apart = float((wanted - found).abs().max())
    if bench.model.dtype == torch.float32 and apart > SAME * max(1.0, float(wanted.abs().max())):
        raise NumericError(f"The exported model's logits differ by {apart:.3g} from the masked dense model's.")


def interrupted(recipe: ConvertRecipe) -> str:
    """What to tell someone who stopped a conversion."""
    partial = Path(recipe.output + ".partial")
    if (partial / "journal.jsonl").exists():
        return f"Stopped. Finished work is kept in {str(partial)!r}; run the same command again to go on."
    return "Stopped before any unit of work was finished."
