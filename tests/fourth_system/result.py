"""The result of the toy."""

from typing import Literal

from freemoe.results.common import MadeDocument, PlanDocument, RunResult


class DampResult(RunResult):
    """What ``freemoe damp`` writes."""

    kind: Literal["damped"]
    factor: float


class DampedDocument(MadeDocument):
    """``freemoe damp``."""

    result: DampResult | None = None


DOCUMENTS = {"": DampedDocument, "-plan": PlanDocument}
