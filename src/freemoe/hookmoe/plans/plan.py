"""Plans: how many experts each layer runs (HookMoE Sec. 3.2-3.3). Plain data; `apply` puts them on a model.

``Expert_N(k, l, r)``: k - 1 experts in the layers l..r, k elsewhere. ``TLNLE(k, l)`` = Expert_N(k, l, N - 1): the layers
below l keep k. Layers count from 0 and include dense ones, whose entry is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freemoe.core.errors import RecipeError

SPELLINGS = "uniform:K, tlnle:K,L, expert_n:K,L,R, or one K per layer: 2,2,1,1 ('-' for a dense layer)"


@dataclass(frozen=True)
class LayerPlan:
    """Experts per token of every decoder layer.

    Attributes:
        ks: One entry per decoder layer; None where the layer is dense.
    """

    ks: tuple[int | None, ...]

    @property
    def act(self) -> float:
        """Executed (token, routed expert) pairs per token and mixture layer; shared experts and hooks do not count."""
        counts = [k for k in self.ks if k is not None]
        return sum(counts) / len(counts)

    @property
    def uniform_k(self) -> int | None:
        """The one k of all mixture layers, or None where they differ."""
        counts = {k for k in self.ks if k is not None}
        return counts.pop() if len(counts) == 1 else None

    def to_text(self) -> str:
        """The form that `parse_plan` reads: ``8,8,-,4``."""
        return ",".join("-" if k is None else str(k) for k in self.ks)

    def with_k(self, layer: int, k: int) -> LayerPlan:
        """The same plan with another k in one layer."""
        return LayerPlan(tuple(k if i == layer else old for i, old in enumerate(self.ks)))


def expert_n(base: LayerPlan, k: int, first: int, last: int) -> LayerPlan:
    """Expert_N(k, l, r): k - 1 in the layers first..last (both included), k elsewhere; dense layers stay dense."""
    layers = len(base.ks)
    if not 0 <= first <= layers or not first - 1 <= last < layers:
        raise RecipeError(
            f"Layers {first}..{last} do not fit a model of {layers} layers; use 0 <= L <= R <= {layers - 1}, counted from 0."
        )
    return LayerPlan(tuple(None if b is None else k - (first <= i <= last) for i, b in enumerate(base.ks)))


def tlnle(base: LayerPlan, k: int, first: int) -> LayerPlan:
    """TLNLE(k, l): the layers below ``first`` keep k, those from it on run k - 1; ``first`` = N keeps k everywhere."""
    return expert_n(base, k, first, len(base.ks) - 1)


def uniform_plan(base: LayerPlan, k: int) -> LayerPlan:
    """The same k in every mixture layer."""
    return LayerPlan(tuple(None if b is None else k for b in base.ks))


def parse_plan(text: str, base: LayerPlan, counts: Sequence[int | None]) -> LayerPlan:
    """Read a plan and check that a model can run it.

    Args:
        text: See ``SPELLINGS``.
        base: The model's own k per layer.
        counts: Routed experts of every decoder layer; None where dense.

    Raises:
        RecipeError: A spelling that cannot be read, a wrong length, or a k that a router does not have.
    """
    name, colon, rest = text.strip().partition(":")
    try:
        numbers = [None if p.strip() == "-" else int(p) for p in (rest if colon else name).split(",")]
    except ValueError:
        raise RecipeError(f"Plan {text!r} cannot be read; write {SPELLINGS}.") from None
    shapes = {"uniform": 1, "tlnle": 2, "expert_n": 3}
    if not colon:
        plan = LayerPlan(tuple(numbers))
    elif name in shapes and len(numbers) == shapes[name] and None not in numbers:
        whole = [n for n in numbers if n is not None]
        plan = {"uniform": uniform_plan, "tlnle": tlnle, "expert_n": expert_n}[name](base, *whole)
    else:
        raise RecipeError(f"Plan {text!r} cannot be read; write {SPELLINGS}.")
    check_plan(plan, counts)
    return plan


def check_plan(plan: LayerPlan, counts: Sequence[int | None]) -> None:
    """Raise unless a model with these routed experts per layer can run the plan."""
    dense = [i for i, c in enumerate(counts) if c is None]
    if len(plan.ks) != len(counts):
        note = f"; the dense layers {dense} get '-'" if dense else ""
        raise RecipeError(
            f"The plan {plan.to_text()} has {len(plan.ks)} entries, and the model has {len(counts)} decoder layers: write one per "
            f"layer{note}."
        )
    for layer, (k, count) in enumerate(zip(plan.ks, counts, strict=True)):
        if (k is None) != (count is None):
            raise RecipeError(
                f"Layer {layer} is {'dense' if count is None else 'a mixture'}, and the plan {plan.to_text()} has "
                f"{'-' if k is None else k} there; dense layers are {dense or 'none'}."
            )
        if k is not None and count is not None and not 1 <= k <= count:
            raise RecipeError(
                f"The plan {plan.to_text()} asks for {k} experts in layer {layer}, whose router has {count}; allowed: 1 to {count}."
            )
