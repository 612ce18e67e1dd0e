"""A rival is a row: what it is, what it changes, for which bases, and the function that fits it.

A further one, here or in another package, is one function and one ``add(Rival(...))``: it is then run, journaled, put
into the table and drawn like all others (docs/rivals.md).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from freemoe.core.errors import RecipeError
from freemoe.core.registry import Registry
from freemoe.domain_experts.purify.batches import AnswerBatch
from freemoe.evals.tasks.documents import Document
from freemoe.models.weights import WeightMatrix

Group = Literal["adaptation", "compression"]
Base = Literal["dense", "mixture"]
CHANGES = ("nothing", "which weights are off", "weights", "extra parameters", "prompt", "routing")
"""What a rival may change."""


@dataclass(frozen=True)
class Schedule:
    """How long a method may train, and when it stops."""

    steps: int = 600  # Most steps
    step_tokens: int = 2048  # Answer tokens of a step, about
    every: int = 50  # Steps between two looks at the stopping loss
    patience: int = 6  # Looks without a better loss before the end


@dataclass(frozen=True, eq=False)
class Materials:
    """All that a rival may look at; the reported documents are not among it."""

    kind: Literal["text", "task"]  # ``text`` or ``task``
    tokenizer: Any  # Of the base
    length: int  # Longest input of the base, in tokens
    weights: list[WeightMatrix]  # Every linear weight of the decoder's layers
    gradient: tuple[Document, ...]  # Reference documents that train or calibrate
    stop: tuple[Document, ...]  # Other reference documents, which stop and choose
    # Puts documents with their gold answers into padded batches
    batches: Callable[[Sequence[Document]], list[AnswerBatch]]
    # Whether the process ends with this rival, so that no copy of the weights has to wait beside it
    alone: bool = False

    @property
    def size(self) -> int:
        """Single weights of the decoder's linears: what shares are shares of."""
        return sum(w.size for w in self.weights)


@dataclass(frozen=True)
class Terms:
    """The terms on which all rivals of a cell meet."""

    # Share of the decoder's linear weights that shall be off or gone; 0 where a rival settles that itself
    share: float = 0.0
    rank: int = 0  # Of low-rank rivals
    rate: float = 0.0  # Learning rate of rivals that train values
    seed: int = 0  # Of everything random
    schedule: Schedule = field(default_factory=Schedule)  # How long may be trained, and when it stops
    number_format: str = "float32"  # In which masks and low-rank pairs are trained


@dataclass(eq=False)
class Fitted:
    """What a rival found, while it stands on the model."""

    model: Any = None  # What is scored; None for the base itself, as it now is
    # Makes of the documents to be scored those that the model is given
    prompted: Callable[[Sequence[Document]], list[Document]] = list
    # On the stopping documents: the base's, then one per look. The best one chooses among learning rates
    losses: Sequence[float] = ()
    numbers: int = 0  # How many numbers were trained or chosen
    bytes: int = 0  # What ships beside the base: values in two bytes each, masks as they are coded
    share_off: float = 0.0  # Share of the decoder's linear weights that a token does without
    facts: dict[str, Any] = field(default_factory=dict)  # What else belongs into the cell
    # What is kept of it, so that it can be tried on other documents
    tensors: dict[str, Tensor] = field(default_factory=dict)


Fit = Callable[..., AbstractContextManager[Fitted]]
"""``fit(model, materials, terms, **options)``: inside its block the model is the rival's, behind it bit-equal again."""


@dataclass(frozen=True)
class Rival:
    """One row."""

    name: str  # Short, without spaces: it stands in cells' names
    about: str  # What it is, in one line
    paper: str  # Where it comes from
    changes: str  # One of `CHANGES`
    # ``adaptation`` (compared at equal data), ``compression`` (at an equal share off), or both
    groups: tuple[Group, ...]
    fit: str  # ``package.module:function``, a `Fit`
    bases: tuple[Base, ...] = ("dense",)  # Kinds of models that it is made for
    options: Mapping[str, Any] = field(default_factory=dict)  # Further keywords of the function
    sized: bool = False  # Whether it is told the share that shall be off
    rank: int = 0  # Of its low-rank pairs, if it has any
    rates: tuple[float, ...] = ()  # Learning rates, each a cell of its own; the best stopping loss decides
    ours: bool = False  # Whether it is this package's own method
    version: int = 1  # Raise it when the method changes so that its old cells no longer speak for it

    def __post_init__(self) -> None:
        for what, seen, allowed in (
            ("changes", (self.changes,), CHANGES),
            ("groups", self.groups, ("adaptation", "compression")),
            ("bases", self.bases, ("dense", "mixture")),
        ):
            wrong = [v for v in seen if v not in allowed]
            if wrong or not seen:
                raise RecipeError(
                    f"Rival {self.name!r}: {what} is {wrong[0] if wrong else 'empty'!r}; allowed: {', '.join(allowed)}."
                )
        if not self.name or any(c.isspace() or c in "/*,+" for c in self.name):
            raise RecipeError(f"A rival is called {self.name!r}; a name has no spaces and none of / * , +.")
        if "compression" in self.groups and not self.sized:
            raise RecipeError(
                f"Rival {self.name!r} is of the group 'compression', so it must be told a share: sized=True."
            )

    def on(self, model: Any, materials: Materials, terms: Terms) -> AbstractContextManager[Fitted]:
        """Fit it: a block in which the model is the rival's."""
        return pkgutil.resolve_name(self.fit)(model, materials, terms, **self.options)


RIVALS: Registry[Rival] = Registry("rival")


def add(rival: Rival) -> Rival:
    """Register a row; a name can be taken once only."""
    return RIVALS.add(rival.name, rival, rival.about)


for _row in yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text(encoding="utf-8")):
    _tuples = {name: tuple(_row[name]) for name in ("groups", "bases", "rates") if name in _row}
    add(Rival(**{**_row, **_tuples, "fit": f"benchmarks.rivals.fits.{_row['fit']}"}))


@contextmanager
def restored(model: Any, weights: Sequence[WeightMatrix]) -> Iterator[None]:
    """Behind the block these weights have their values again, bit by bit, and all parameters their flags and gradients."""
    flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    values = [(w.parameter, w.parameter.data, w.parameter.detach().clone()) for w in weights]
    try:
        yield
    finally:
        for p, own, before in values:
            p.data = own
            with torch.no_grad():
                p.copy_(before)
        for p, asked, gradient in flags:
            p.requires_grad_(asked)
            p.grad = gradient
