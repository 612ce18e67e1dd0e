"""Plans and rules of k per token beside each other on one text, without hooks (HookMoE Sec. 4.3; Tables 5 and 8).

`compare_plans` takes a loaded mixture, blocks of text and spellings, and gives plain data: `freemoe trim --compare` prints it,
and a sweep of a paper's table is a list of spellings.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from freemoe.core.errors import RecipeError
from freemoe.core.run.journal import Journal
from freemoe.core.run.progress import Progress, Quiet
from freemoe.hookmoe.hooks.teacher import Teacher, teach
from freemoe.hookmoe.measure import measure
from freemoe.hookmoe.plans.apply import applied, expert_counts, plan_of
from freemoe.hookmoe.plans.dynamic import RULES, Dynamic, naee_thresholds, ramp, router_weights, tuned
from freemoe.hookmoe.plans.layers import moe_layers
from freemoe.hookmoe.plans.plan import SPELLINGS as PLANS
from freemoe.hookmoe.plans.plan import Plan, expert_n, parse_plan
from freemoe.text.blocks import Blocks

SPELLINGS = (
    f"{PLANS}; sweep:G, every Expert_N(k, l, r) over groups of G layers; top_p:P or top_p:P,SPAN, rel_threshold:T or "
    "rel_threshold:T,SPAN (a linear ramp over layers); top_p:act=A, rel_threshold:act=A (tuned on other text); naee"
)
_CALIBRATION_ROWS = 32


@dataclass(frozen=True)
class Way:
    """One way of running fewer experts.

    Attributes:
        name: As it is spelled; a sweep's members are spelled one by one.
        plan: Experts per layer, or None where a rule decides per token.
        rule: One of ``dynamic.RULES``, or None for a plan.
        start: Threshold of layer 0, or the Act to be tuned to; None for ``naee``.
        span: How far the threshold goes over all layers.
        tuned: Whether ``start`` is an Act.
    """

    name: str
    plan: Plan | None = None
    rule: str | None = None
    start: float | None = None
    span: float = 0.0
    tuned: bool = False

    @property
    def calibrated(self) -> bool:
        """Whether its thresholds come from text."""
        return self.tuned or self.rule == "naee"


def read_ways(spellings: Sequence[str], model: Any) -> list[Way]:
    """Read spellings, sweeps spelled out, each way once.

    Raises:
        RecipeError: A spelling that cannot be read, or a plan or threshold that the model cannot run.
    """
    found: dict[str, Way] = {}
    for text in spellings:
        name, _, rest = text.strip().partition(":")
        ways = _sweep(rest, text, model) if name == "sweep" else [_way(name, rest, text.strip(), model)]
        found.update({way.name: way for way in ways})
    return list(found.values())


def _way(name: str, rest: str, text: str, model: Any) -> Way:
    if name not in RULES:
        return Way(text, parse_plan(text, plan_of(model), expert_counts(model)))
    if name == "naee":
        if rest:
            raise RecipeError(f"{text!r}: naee finds its thresholds itself; write naee.")
        return Way(text, rule=name)
    by_act = rest.startswith("act=")
    try:
        numbers = [float(part) for part in rest.removeprefix("act=").split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in ((1,) if by_act else (1, 2)):
        raise RecipeError(f"{text!r} cannot be read; write {SPELLINGS}.")
    start, span = numbers[0], numbers[1] if len(numbers) == 2 else 0.0
    low, high = (1.0, plan_of(model).act) if by_act else (0.0, 1.0)
    if not low <= start <= high:
        raise RecipeError(f"{text!r}: {start:g} is not between {low:g} and {high:g}.")
    return Way(text, rule=name, start=start, span=span, tuned=by_act)


def _sweep(rest: str, text: str, model: Any) -> list[Way]:
    """Every Expert_N(k, l, r) whose l begins a group of layers and whose r ends one (Figure 1, Table 8)."""
    base = plan_of(model)
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
    return [Way(f"expert_n:{k},{first},{last}", expert_n(base, k, first, last)) for first, last in ends]


def compare_plans(
    model: Any,
    blocks: Blocks,
    plans: Sequence[str],
    *,
    calibration: Blocks | None = None,
    rescale: str = "none",
    top: int = 64,
    journal: Journal | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measure plans and rules of k per token on one text.

    Args:
        model: A loaded mixture, with nothing on it; bit-equal afterwards.
        blocks: The text that is measured.
        plans: As ``SPELLINGS`` says.
        calibration: Other text, from which ``naee`` and tuned rules take their thresholds.
        rescale: The plans' rule for router weights, see `applied`; rules per token have the model's own.
        top: Tokens kept of the full model's distribution per position.
        journal: Keeps what was measured: a run that was stopped goes on.
        progress: Where to report.

    Returns:
        One row per way, the full model first: ``name``; ``plan``, experts per layer, or ``thresholds`` by layer; ``act`` and
        ``act_per_layer``; ``loss`` and ``kl`` from the full model in nats per token; ``accuracy`` of the next token in per cent;
        ``tokens``.

    Raises:
        RecipeError: A spelling that cannot be read, or a rule that needs calibration text where there is none.
    """
    ways = read_ways(plans, model)
    needy = [way.name for way in ways if way.calibrated]
    if needy and calibration is None:
        raise RecipeError(f"{', '.join(needy)}: thresholds come from calibration text, and none was given.")
    progress = progress or Quiet()
    teacher: list[Teacher] = []
    seen: list[Any] = []

    def work(way: Way) -> dict[str, Any]:
        if not teacher:
            teacher.append(teach(model, blocks, top, progress))
        if way.calibrated and not seen and calibration is not None:
            some = calibration.rows(range(min(_CALIBRATION_ROWS, len(calibration))))
            seen.append(router_weights(model, some))
        return _measured(model, blocks, teacher[0], way, rescale, seen)

    rows = []
    full = Way("full", plan_of(model))
    with progress.stage("compared plans", len(ways) + 1) as advance:
        for way in (full, *ways):
            name = f"compare|{rescale}|{way.name}"
            rows.append(journal.unit(name, lambda way=way: work(way)) if journal else work(way))
            advance(1)
    return rows


def _measured(
    model: Any, blocks: Blocks, teacher: Teacher, way: Way, rescale: str, seen: Sequence[Any]
) -> dict[str, Any]:
    layers = [layer.number for layer in moe_layers(model)]
    if way.plan is not None:
        own = way.plan == plan_of(model)
        with nullcontext() if own else applied(model, way.plan, rescale):
            quality = measure(model, blocks, teacher)
        act = {str(n): float(way.plan.ks[n] or 0) for n in layers}
        how: dict[str, Any] = {"plan": list(way.plan.ks)}
    else:
        thresholds = _thresholds(way, layers, len(plan_of(model).ks), seen)
        with Dynamic(way.rule or "", thresholds).applied(model) as counts:
            quality = measure(model, blocks, teacher)
        act = {str(n): counts[n][0] / counts[n][1] for n in layers}
        how = {"thresholds": {str(n): t for n, t in thresholds.items()}}
    return {
        "name": way.name,
        **how,
        "act": sum(act.values()) / len(act),
        "act_per_layer": act,
        "loss": quality.mean_ce,
        "kl": quality.mean_kl,
        "accuracy": 100 * quality.accuracy,
        "tokens": int(quality.tokens.sum()),
    }


def _thresholds(way: Way, layers: Sequence[int], total: int, seen: Sequence[Any]) -> dict[int, float]:
    if way.rule == "naee":
        return naee_thresholds(seen[0])
    assert way.rule is not None
    assert way.start is not None
    if way.tuned:
        return tuned(way.rule, seen[0], way.start)
    return ramp(way.rule, way.start, layers, way.span, total)
