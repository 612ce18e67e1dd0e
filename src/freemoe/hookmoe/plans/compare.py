"""Plans and rules of k per token beside each other on one text, without hooks (HookMoE Sec. 4.3; Tables 5 and 8).

`compare_plans` takes a loaded mixture, blocks of text and spellings, and gives plain data: `freemoe trim --compare` prints it,
and a sweep of a paper's table is a list of spellings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freemoe.core.errors import RecipeError
from freemoe.core.run.folder import RunFolder
from freemoe.core.run.progress import Progress, QuietProgress
from freemoe.core.run.unit_state import NO_CHECKPOINT
from freemoe.hookmoe.hooks.teacher import TeacherLogits, compute_teacher_logits
from freemoe.hookmoe.measure import measure_quality
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.dynamic import (
    RULES,
    act_of,
    apply_rule,
    naee_thresholds,
    ramp_thresholds,
    router_weights,
    tune_thresholds,
)
from freemoe.hookmoe.plans.layers import expert_counts, moe_layers, plan_of
from freemoe.hookmoe.plans.plan import SPELLINGS as PLANS
from freemoe.hookmoe.plans.plan import LayerPlan, expert_n, parse_plan
from freemoe.text.blocks import PackedBlocks

SPELLINGS = (
    f"{PLANS}; sweep:G, every Expert_N(k, l, r) over groups of G layers; top_p:P or top_p:P,SPAN, rel_threshold:T or "
    "rel_threshold:T,SPAN (a linear ramp over layers); top_p:act=A, rel_threshold:act=A (tuned on other text); naee"
)
_CALIBRATION_ROWS = 32


@dataclass(frozen=True)
class RoutingVariant:
    """One way of running fewer experts."""

    name: str  # As it is spelled; a sweep's members are spelled one by one
    plan: LayerPlan | None = None  # Experts per layer, or None where a rule decides per token
    rule: str | None = None  # One of ``dynamic.RULES``, or None for a plan
    # Of a rule: router weights on calibration text by layer (None where it needs none) -> threshold by layer
    thresholds: Callable[[Any], dict[int, float]] | None = None
    needs_calibration: bool = False  # Whether its thresholds come from text


def read_variants(spellings: Sequence[str], model: Any) -> list[RoutingVariant]:
    """Read spellings, sweeps spelled out, each way once.

    Raises:
        RecipeError: A spelling that cannot be read, or a plan or threshold that the model cannot run.
    """
    found: dict[str, RoutingVariant] = {}
    base, counts = plan_of(model), expert_counts(model)
    for text in map(str.strip, spellings):
        name, _, rest = text.partition(":")
        if name == "sweep":
            ways = _expand_sweep(rest, text, base)
        elif name in RULES:
            ways = [_parse_rule(name, rest, text, base)]
        else:
            ways = [RoutingVariant(text, parse_plan(text, base, counts))]
        found.update({way.name: way for way in ways})
    return list(found.values())


def _parse_rule(name: str, rest: str, text: str, base: LayerPlan) -> RoutingVariant:
    if name == "naee":
        if rest:
            raise RecipeError(f"{text!r}: naee finds its thresholds itself; write naee.")
        return RoutingVariant(text, None, name, naee_thresholds, True)
    by_act = rest.startswith("act=")
    try:
        numbers = [float(part) for part in rest.removeprefix("act=").split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in ((1,) if by_act else (1, 2)):
        raise RecipeError(f"{text!r} cannot be read; write {SPELLINGS}.")
    start, span = numbers[0], numbers[1] if len(numbers) == 2 else 0.0
    low, high = (1.0, base.act) if by_act else (0.0, 1.0)
    if not low <= start <= high:
        raise RecipeError(f"{text!r}: {start:g} is not between {low:g} and {high:g}.")
    if by_act:
        return RoutingVariant(text, None, name, lambda weights: tune_thresholds(name, weights, start), True)
    layers, total = [n for n, k in enumerate(base.ks) if k is not None], len(base.ks)
    return RoutingVariant(text, None, name, lambda weights: ramp_thresholds(name, start, layers, span, total))


def _expand_sweep(rest: str, text: str, base: LayerPlan) -> list[RoutingVariant]:
    """Every Expert_N(k, l, r) whose l begins a group of layers and whose r ends one (Figure 1, Table 8)."""
    layers, k = len(base.ks), max(b for b in base.ks if b is not None)
    try:
        group = int(rest)
    except ValueError:
        group = 0
    if not 1 <= group <= layers:
        raise RecipeError(f"{text!r} cannot be read; write sweep:G with G from 1 to {layers}, the model's layers.")
    if k < 2:
        raise RecipeError(f"{text!r}: the model runs {k} expert per token: there is nothing to cut.")
    firsts = range(0, layers, group)
    ends = [(first, min(last + group, layers) - 1) for first in firsts for last in firsts if last >= first]
    return [RoutingVariant(f"expert_n:{k},{first},{last}", expert_n(base, k, first, last)) for first, last in ends]


def compare_plans(
    model: Any,  # A loaded mixture, with nothing on it; bit-equal afterwards
    blocks: PackedBlocks,  # The text that is measured
    plans: Sequence[str],  # As ``SPELLINGS`` says
    *,
    calibration: PackedBlocks | None = None,  # Other text, from which ``naee`` and tuned rules take their thresholds
    rescale: str = "none",  # The plans' rule for router weights, see `apply_plan`; rules per token have the model's own
    top: int = 64,  # Tokens kept of the full model's distribution per position
    run: RunFolder | None = None,  # Keeps what was measured: a run that was stopped goes on
    progress: Progress | None = None,  # Where to report
) -> list[dict[str, Any]]:
    """Measure plans and rules of k per token on one text.

    Returns:
        One row per way, the full model first: ``name``; ``plan``, experts per layer, or ``thresholds`` by layer; ``act`` and
        ``act_per_layer``; ``loss`` and ``kl`` from the full model in nats per token; ``accuracy`` of the next token in per cent;
        ``tokens``.

    Raises:
        RecipeError: A spelling that cannot be read, or a rule that needs calibration text where there is none.
    """
    ways = read_variants(plans, model)
    needy = [way.name for way in ways if way.needs_calibration]
    if needy and calibration is None:
        raise RecipeError(f"{', '.join(needy)}: thresholds come from calibration text, and none was given.")
    progress = progress or QuietProgress()

    @functools.cache
    def teacher() -> TeacherLogits:
        checkpoint = run.unit_state("compare|teacher") if run else NO_CHECKPOINT
        return compute_teacher_logits(model, blocks, top, progress, checkpoint=checkpoint)

    @functools.cache
    def seen() -> dict[int, Tensor]:
        assert calibration is not None
        return router_weights(model, calibration.select_rows(range(min(_CALIBRATION_ROWS, len(calibration)))))

    def unit_of(way: RoutingVariant) -> str:
        return f"compare|{rescale}|{way.name}"

    def compute_row(way: RoutingVariant) -> dict[str, Any]:
        given = teacher()
        thresholds = way.thresholds(seen() if way.needs_calibration else None) if way.thresholds is not None else None
        # A rule's counts are of all tokens that ran: such a way is measured in one go.
        checkpoint = run.unit_state(unit_of(way)) if run and way.plan is not None else NO_CHECKPOINT
        with apply_variant(model, way, thresholds, rescale) as counts:
            quality = measure_quality(model, blocks, given, checkpoint)
        how: dict[str, Any] = {"plan": list(way.plan.ks)} if way.plan is not None else {}
        if thresholds is not None:
            how = {"thresholds": {str(n): t for n, t in thresholds.items()}}
        return {
            "name": way.name,
            **how,
            "act": act_of(counts),
            "act_per_layer": {str(n): executed / tokens for n, (executed, tokens) in counts.items()},
            "loss": quality.mean_ce,
            "kl": quality.mean_kl,
            "accuracy": 100 * quality.accuracy,
            "tokens": int(quality.tokens.sum()),
        }

    rows = []
    full = RoutingVariant("full", plan_of(model))
    with progress.stage("compared plans", len(ways) + 1) as advance:
        for way in (full, *ways):
            rows.append(run.run_unit(unit_of(way), lambda way=way: compute_row(way)) if run else compute_row(way))
            advance(1)
    return rows


@contextmanager
def apply_variant(
    model: Any, way: RoutingVariant, thresholds: Mapping[int, float] | None = None, rescale: str = "none"
) -> Iterator[Mapping[int, Sequence[int]]]:
    """While open, the model runs fewer experts in one way.

    ``thresholds`` by layer are a rule's, and for no plan.

    Yields:
        Layer -> executed experts and tokens; a rule's fill as the model runs.
    """
    layers = [layer.number for layer in moe_layers(model)]
    if way.plan is not None:
        own = way.plan == plan_of(model)
        with nullcontext() if own else apply_plan(model, way.plan, rescale):
            yield {n: (way.plan.ks[n] or 0, 1) for n in layers}
    else:
        assert way.rule is not None
        assert thresholds is not None
        with apply_rule(model, way.rule, thresholds) as counts:
            yield counts
