"""What runs write into ``result.json``, typed: one file per system, as `recipes` has one for what they read."""

from freemoe.results.build import BuildResult
from freemoe.results.common import Interval, Result
from freemoe.results.convert import ConvertResult
from freemoe.results.evaluation import Evaluation
from freemoe.results.reading import read_result, shown
from freemoe.results.trim import TrimResult

__all__ = ["BuildResult", "ConvertResult", "Evaluation", "Interval", "Result", "TrimResult", "read_result", "shown"]
