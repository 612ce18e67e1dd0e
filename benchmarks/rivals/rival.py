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
    """How long a method may train, and when it stops.

    Attributes:
        steps: Most steps.
        step_tokens: Answer tokens of a step, about.
        every: Steps between two looks at the stopping loss.
        patience: Looks without a better loss before the end.
    """

    steps: int = 600
    step_tokens: int = 2048
    every: int = 50
    patience: int = 6


@dataclass(frozen=True, eq=False)
class Materials:
    """All that a rival may look at; the reported documents are not among it.

    Attributes:
        kind: ``text`` or ``task``.
        tokenizer: Of the base.
        length: Longest input of the base, in tokens.
        weights: Every linear weight of the decoder's layers.
        gradient: Reference documents that train or calibrate.
        stop: Other reference documents, which stop and choose.
        batches: Puts documents with their gold answers into padded batches.
        alone: Whether the process ends with this rival, so that no copy of the weights has to wait beside it.
    """

    kind: Literal["text", "task"]
    tokenizer: Any
    length: int
    weights: list[WeightMatrix]
    gradient: tuple[Document, ...]
    stop: tuple[Document, ...]
    batches: Callable[[Sequence[Document]], list[AnswerBatch]]
    alone: bool = False

    @property
    def size(self) -> int:
        """Single weights of the decoder's linears: what shares are shares of."""
        return sum(w.size for w in self.weights)


@dataclass(frozen=True)
class Terms:
    """The terms on which all rivals of a cell meet.

    Attributes:
        share: Share of the decoder's linear weights that shall be off or gone; 0 where a rival settles that itself.
        rank: Of low-rank rivals.
        rate: Learning rate of rivals that train values.
        seed: Of everything random.
        schedule: How long may be trained, and when it stops.
        number_format: In which masks and low-rank pairs are trained.
    """

    share: float = 0.0
    rank: int = 0
    rate: float = 0.0
    seed: int = 0
    schedule: Schedule = field(default_factory=Schedule)
    number_format: str = "float32"


@dataclass(eq=False)
class Fitted:
    """What a rival found, while it stands on the model.

    Attributes:
        model: What is scored; None for the base itself, as it now is.
        prompted: Makes of the documents to be scored those that the model is given.
        losses: On the stopping documents: the base's, then one per look. The best one chooses among learning rates.
        numbers: How many numbers were trained or chosen.
        bytes: What ships beside the base: values in two bytes each, masks as they are coded.
        share_off: Share of the decoder's linear weights that a token does without.
        facts: What else belongs into the cell.
        tensors: What is kept of it, so that it can be tried on other documents.
    """

    model: Any = None
    prompted: Callable[[Sequence[Document]], list[Document]] = list
    losses: Sequence[float] = ()
    numbers: int = 0
    bytes: int = 0
    share_off: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


Fit = Callable[..., AbstractContextManager[Fitted]]
"""``fit(model, materials, terms, **options)``: inside its block the model is the rival's, behind it bit-equal again."""


@dataclass(frozen=True)
class Rival:
    """One row.

    Attributes:
        name: Short, without spaces: it stands in cells' names.
        about: What it is, in one line.
        paper: Where it comes from.
        changes: One of `CHANGES`.
        groups: ``adaptation`` (compared at equal data), ``compression`` (at an equal share off), or both.
        fit: ``package.module:function``, a `Fit`.
        bases: Kinds of models that it is made for.
        options: Further keywords of the function.
        sized: Whether it is told the share that shall be off.
        rank: Of its low-rank pairs, if it has any.
        rates: Learning rates, each a cell of its own; the best stopping loss decides.
        ours: Whether it is this package's own method.
        version: Raise it when the method changes so that its old cells no longer speak for it.
    """

    name: str
    about: str
    paper: str
    changes: str
    groups: tuple[Group, ...]
    fit: str
    bases: tuple[Base, ...] = ("dense",)
    options: Mapping[str, Any] = field(default_factory=dict)
    sized: bool = False
    rank: int = 0
    rates: tuple[float, ...] = ()
    ours: bool = False
    version: int = 1

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
