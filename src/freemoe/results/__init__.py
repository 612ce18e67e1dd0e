"""What runs write into ``result.json``, typed: what all have in common; each system has its own (``result.py`` in its folder)."""

from freemoe.results.common import IntervalResult, RunResult
from freemoe.results.evaluation import EvaluationResult
from freemoe.results.reading import read_result, wrap_display_errors

__all__ = ["EvaluationResult", "IntervalResult", "RunResult", "read_result", "wrap_display_errors"]
