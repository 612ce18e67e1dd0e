"""lm-eval's code tasks with our sandbox in the place of the metric that they fetch from the hub at import.

The modules of HumanEval and MBPP call ``evaluate.load("code_eval")`` while they are imported: a download,
and a metric that runs programs in the same process tree without limits. While lm-eval reads such a YAML,
that one call is answered with `SandboxedCodeEval`; afterwards everything is as it was, lm-eval's module
cache included.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from freemoe.compat.lm_eval import code_metric_replaced
from freemoe.evals.sandbox.runner import Permission, pass_at_k, require_permission, run_tests

log = logging.getLogger(__name__)


class SandboxedCodeEval:
    """Same call and same scores as the hub's ``code_eval``, run in the sandbox, only when allowed."""

    def __init__(self, allowed: Permission = False) -> None:
        self.allowed: Permission = allowed
        self.loading = False
        self.warned = False

    def compute(
        self,
        *,
        references: Sequence[str],
        predictions: Sequence[Sequence[str]],
        k: Sequence[int] = (1,),
        **_: Any,
    ) -> tuple[dict[str, float], dict[int, list]]:
        """Run every candidate with its test; return the mean pass@k, and no details."""
        if self.loading:  # lm-eval tries the metric once while it imports; nothing is run for that
            return {f"pass@{n}": 0.0 for n in k}, {}
        isolation = require_permission(self.allowed)
        if isolation == "none" and not self.warned:
            self.warned = True
            log.warning("Bubblewrap does not start here, so nothing stands around generated programs but limits.")
        passed = [
            [run_tests(f"{candidate}\n{test}", isolation=isolation).passed for candidate in candidates]
            for test, candidates in zip(references, predictions, strict=True)
        ]
        scores = {
            f"pass@{n}": sum(pass_at_k(len(one), sum(one), n) for one in passed) / len(passed)
            for n in k
            if all(len(one) >= n for one in passed)
        }
        return scores, {}


@contextmanager
def sandboxed_code_eval(metric: SandboxedCodeEval | None) -> Iterator[None]:
    """Answer ``evaluate.load("code_eval")`` with ``metric`` inside the block; None changes nothing."""
    if metric is None:
        yield
        return
    with code_metric_replaced(metric):
        metric.loading = True
        try:
            yield
        finally:
            metric.loading = False
