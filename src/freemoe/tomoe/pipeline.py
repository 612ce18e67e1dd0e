"""`convert`: from a recipe to a model whose tokens use a part of the dense model's weights.

Recipe -> text in parts -> where to begin -> training -> structure -> exported model -> scores of it, of the dense model and
of the rivals; this file only puts them in order. Train text trains, held-out text settles K and the rivals' variants, and
test text is only reported.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from freemoe.core.files import write_atomic
from freemoe.core.run.ahead import ParallelStages
from freemoe.core.run.execute import RunOutput, is_finished, open_run, publish_run
from freemoe.core.run.folder import RunFolder, RunPart
from freemoe.core.run.places import executor_spec_of
from freemoe.core.run.progress import Progress, default_progress
from freemoe.distributed.executors import executor_of, require_place
from freemoe.evals.guessing import text_against_guessing, vocabulary_of
from freemoe.evals.held_out import keep_text_record
from freemoe.evals.keywords import resolve_recipe
from freemoe.evals.speed import compare_prompts, prompt_lengths
from freemoe.evals.text_score import score_text
from freemoe.kernels.gates import route_tokens
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.checkpoints.identity import IDENTITY, identify_base
from freemoe.models.checkpoints.lending import provided_model
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.hooks import combined_hooks, forward_pre_hook
from freemoe.recipes import recipe_from
from freemoe.text.blocks import row_texts
from freemoe.tomoe.artefact import read_files
from freemoe.tomoe.card import model_card
from freemoe.tomoe.devices import DistributedContext
from freemoe.tomoe.export import export_converted_model
from freemoe.tomoe.gates.train import HISTORY_COLUMNS
from freemoe.tomoe.material import ConversionContext, input_digests, prepare_context
from freemoe.tomoe.measure.agreement import layer_inputs, mismatch_shares, require_agreement
from freemoe.tomoe.recipe import ConvertRecipe
from freemoe.tomoe.result import ConvertResult
from freemoe.tomoe.structures.masked import apply_structure
from freemoe.tomoe.structures.methods import (
    GATHERED,
    best_variant,
    collect_activity,
    evaluate_structure,
    run_worker_rank,
    search_structure,
)
from freemoe.tomoe.structures.rivals import RIVALS
from freemoe.tomoe.structures.structure import (
    STRUCTURE,
    LayerStructure,
    Structure,
    active_parameters,
    dense_parameters,
    to_tensors,
)

COMPARED = 1024
"""Tokens at most on which the exported model is held against the masks on the dense one."""


def convert(
    recipe: ConvertRecipe | None = None,
    *,
    progress: Progress | None = None,
    overwrite: bool = False,
    resume: bool = True,
    page: Callable[[Path], Any] | None = None,
    tokenizer: Any = None,
    **fields: Any,
) -> Path:
    """Make a dense model a token-level mixture of experts, and say how good it is.

    Instead of a recipe its fields can be given by keywords, a section as a mapping or its fields by their own names; ``model`` may
    then be a loaded model, and data may be in memory: it is written beside the run, as ``OUTPUT.data/NAME.jsonl``.

    Example:
        convert(model="./my-model", text=["One document.", "Another one."], active=0.5, output="half")

    Args:
        recipe: What to convert, and how.
        progress: Where to report.
        overwrite: Replace a finished folder of the same name.
        resume: Go on with an unfinished run of the same recipe.
        page: Draws a page into the folder that it is given, before that appears (`freemoe.artefacts.write_page`).
        tokenizer: Of a loaded model; the one beside its files if absent.
        fields: In place of the recipe.

    Returns:
        The converted model's folder.

    Raises:
        FreeMoEError: Its child that says what is wrong; no folder named like the output is left half written.
    """
    devices = DistributedContext.from_environment()
    with resolve_recipe(ConvertRecipe, recipe, fields, tokenizer, overwrite) as recipe:
        if devices.rank:
            run_worker_rank(recipe, devices)
            return Path(recipe.output)
        if resume and is_finished(recipe):
            return Path(recipe.output)
        with open_run(recipe, overwrite=overwrite, resume=resume) as run:
            output = _run_conversion(recipe, devices, run, progress or default_progress())
            return publish_run(run, ConvertResult, recipe, output, read_files, model_card, page)


def _run_conversion(
    recipe: ConvertRecipe, devices: DistributedContext, run: RunFolder, progress: Progress
) -> RunOutput:
    require_place(recipe)
    context = prepare_context(recipe, run, progress)
    base = fingerprint_model(context.model)
    settings = identify_base(context.model, context.tokenizer)
    run.require_same_inputs(input_digests(context, base, settings))
    structure, history, curve = search_structure(context, devices)
    scores = {"dense": evaluate_structure(context, "dense", context.test, None)}
    scores["converted"] = evaluate_structure(context, "converted", context.test, structure)
    guessing = text_against_guessing(
        scores["dense"][f"perplexity@{context.test.row_length}"], vocabulary_of(context.model)
    )
    rivals = _score_baselines(context) if recipe.rivals and recipe.method == "tomoe" else {}
    scores |= {name: score for name, (score, _) in rivals.items()}
    parameters = parameter_summary(context, structure)
    folder, usage = run.partial, _expert_usage(context, structure)
    speed = _export_and_time(context, structure, folder)
    result = {
        "base": {"name": recipe.model, "fingerprint": base, "model_type": context.model.config.model_type},
        "blocks": {
            "length": context.train.row_length,
            **{part: getattr(context, part).num_tokens for part in ("train", "held_out", "test")},
            "test_groups": context.test.group_numbers(),
        },
        "parameters": parameters,
        **missed_budget(recipe.active, parameters["active_share"]),
        **({"guessing": guessing} if guessing else {}),
        "layers": [
            {
                "query_dims": int(layer.rotary.expand_bits(own.qk.float()).sum()),
                "value_dims": own.value_width,
                "head_dim": layer.rotary.head_dim,
                "head_share": float(own.head_share),
                "widths": own.neuron_counts,
                "union": own.union_width,
                "width": layer.intermediate_size,
            }
            for layer, own in zip(context.sublayers, structure, strict=True)
        ],
        "usage": usage,
        **speed,
        "scores": scores,
        "rivals": {name: variant for name, (_, variant) in rivals.items()},
        "history": {"columns": list(HISTORY_COLUMNS), "rows": history},
        "held_out_curve": curve,
    }
    write_atomic(folder / STRUCTURE, save(to_tensors(structure)))
    models = [p for p in folder.glob("*.safetensors") if p.name.startswith("model")]
    return RunOutput(
        base_fingerprint=base,
        result=result,
        manifest={IDENTITY: settings},
        seen=keep_text_record(
            folder, context.tokenizer, (context.train, context.held_out), context.test, context.questions
        ),
        reported=row_texts(context.tokenizer, context.test),
        cost={"model_bytes": sum(p.stat().st_size for p in models)},
    )


def _score_baselines(context: ConversionContext) -> dict[str, tuple[dict[str, Any], dict[str, float]]]:
    """Every rival, from the journal where workers have done it by now."""
    if executor_spec_of(context.recipe).is_parallel:
        collect_activity(context)  # before the workers, which all look at it
        known = {"recipe": context.recipe.model_dump(mode="json")}
        work = f"{__name__}:{work_ahead.__name__}"
        with (
            ParallelStages(
                context.own_run, executor_of(context.recipe), work, known, lambda stage, name, unit: unit in GATHERED
            ) as ahead,
            context.progress.stage("rivals", len(RIVALS.names())) as advance,
        ):
            ahead.run_stage("rival", RIVALS.names(), lambda name: advance(1))
    return {method: _score_baseline(context, method) for method in RIVALS.names()}


def _score_baseline(context: ConversionContext, method: str) -> tuple[dict[str, Any], dict[str, float]]:
    structure, variant = best_variant(context, method)
    return evaluate_structure(context, method, context.test, structure), variant


def work_ahead(recipe: dict[str, Any], output: str, stage: str, name: str) -> None:
    """Measure a rival for a conversion that another process makes, and leave it in its run folder."""
    context = _context_once(json.dumps(recipe), output)
    context.run = RunPart(output, f"{stage}|{name}")
    _score_baseline(context, name)


@functools.lru_cache(maxsize=1)
def _context_once(recipe: str, output: str) -> ConversionContext:
    """The conversion of this process, whose base is loaded once."""
    read = recipe_from(json.loads(recipe))
    assert isinstance(read, ConvertRecipe)
    run = RunPart(output, "begun")
    context = prepare_context(read, run, None)
    run.require_same_inputs(
        input_digests(context, fingerprint_model(context.model), identify_base(context.model, context.tokenizer))
    )
    return context


def parameter_summary(context: ConversionContext, structure: Structure) -> dict[str, Any]:
    """Parameters of the decoder's linears and of the whole model, nominal and real.

    Nominal counts a value dimension that a token masks as saved, as the paper does; real counts only what need not be
    read or multiplied at run time: token-wise V/O masks save nothing there.
    """
    dense = dense_parameters(context.sublayers)
    nominal = active_parameters(structure, context.sublayers)
    real = nominal + sum(
        layer.hidden_size * (layer.heads + layer.kv_heads) * (layer.rotary.head_dim - own.value_width)
        for layer, own in zip(context.sublayers, structure, strict=True)
        if not isinstance(own.vo, Tensor)
    )
    gates = sum(t.numel() for name, t in to_tensors(structure).items() if "router" in name or ".vo." in name)
    total = sum(p.numel() for p in context.model.parameters())
    # A token's hidden state is multiplied by all weights but an embedding table that is no head as well.
    table = context.model.get_input_embeddings().weight
    multiplied = total if table is context.model.get_output_embeddings().weight else total - table.numel()
    return {
        "dense_linears": dense,
        "active_linears": nominal,
        "active_share": nominal / dense,
        "active_share_at_run_time": (real + gates) / dense,
        "total": total,
        "active_total": total - dense + nominal,
        "active_share_with_embeddings": (total - dense + nominal) / total,
        "gates": gates,
        # Two per weight and token: multiply and add. Attention over the context comes on top, the same for both.
        "flops_per_token": {"dense": 2 * multiplied, "converted": 2 * (multiplied - dense + real + gates)},
    }


def missed_budget(requested: float, got: float) -> dict[str, dict[str, float]]:
    """What the result says where a token uses other than the asked share: a hundredth of it more, or 0.01 less; else no entry."""
    return (
        {"missed_budget": {"asked": requested, "got": got}} if got > 1.01 * requested or got < requested - 0.01 else {}
    )


@torch.no_grad()
def _expert_usage(context: ConversionContext, structure: Structure) -> list[list[float]]:
    """Per layer the share of held-out tokens that each expert gets."""
    counts = [torch.zeros(len(own.experts)) for own in structure]

    def count_tokens(count: Tensor, layer: LayerStructure, module: Any, args: Any) -> None:
        router = layer.router_weight.to(args[0].device), layer.router_bias.to(args[0].device)
        count.add_(torch.bincount(route_tokens(args[0].flatten(0, -2), *router).cpu(), minlength=len(layer.experts)))

    parts = zip(context.sublayers, counts, structure, strict=True)
    listening = combined_hooks(
        *(forward_pre_hook(s.up[0], partial(count_tokens, count, own)) for s, count, own in parts)
    )
    with apply_structure(context.model, structure, context.sublayers), listening:
        score_text(context.model, context.held_out.select_rows(range(min(8, len(context.held_out)))))
    return [(c / c.sum()).tolist() for c in counts]


def _export_and_time(context: ConversionContext, structure: Structure, folder: Path) -> dict[str, Any]:
    """Write the model, load it again, hold it against the masks on the dense one, and time the two; the dense one is then gone."""
    export_converted_model(
        context.model, structure, folder, mode=context.recipe.mode, tokenizer=context.tokenizer, resume=True
    )
    device, paths = context.model.device, [layer.path for layer in context.sublayers]
    ids = context.test.ids[:1, :COMPARED].to(device)
    with apply_structure(context.model, structure, context.sublayers):
        given, logits = layer_inputs(context.model, paths, ids)
    timing = context.recipe.timing
    lengths = prompt_lengths(timing, context.model, context.test.row_length)
    if not lengths and provided_model(context.recipe.model) is None:
        # Nothing is left for it to do, and the two together would take twice the memory.
        context.model.to("meta")
    loaded, _ = load_base(folder, device=str(device))
    require_agreement(mismatch_shares(loaded, paths, ids, given, logits), ids.numel())
    sides = {"dense": partial(_eval_mode, context.model), "converted": partial(_eval_mode, loaded)}
    return compare_prompts(timing, sides, context.test.ids.flatten().to(device), lengths, context.own_run)


@contextmanager
def _eval_mode(model: Any) -> Iterator[Any]:
    """A model in evaluation mode: in training mode, which checkpointing needs, it answers without a cache."""
    before = model.training
    try:
        yield model.eval()
    finally:
        model.train(before)
