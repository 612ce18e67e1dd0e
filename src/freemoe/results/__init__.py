"""What runs write into ``result.json``, typed: one file per system, as `recipes` has one for what they read."""

from freemoe.results.build import BuildResult
from freemoe.results.common import IntervalResult, RunResult
from freemoe.results.convert import ConvertResult
from freemoe.results.evaluation import EvaluationResult
from freemoe.results.reading import read_result, wrap_display_errors
from freemoe.results.trim import TrimResult

__all__ = [
    "BuildResult",
    "ConvertResult",
    "EvaluationResult",
    "IntervalResult",
    "RunResult",
    "TrimResult",
    "read_result",
    "wrap_display_errors",
]
