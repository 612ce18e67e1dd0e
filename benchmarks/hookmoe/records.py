"""Rows of the quality benchmark that are measured already: one file each, so that a run that was stopped goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kept import keep_record, read_record
from benchmarks.real_llm.protocol import model_digest
from freemoe.core.environment import DECIDING, package_versions
from freemoe.core.files import json_digest
from freemoe.evals.text_score import TextScore
from freemoe.hookmoe.material import TextParts
from freemoe.hookmoe.measure import quality_as_json


@dataclass(frozen=True, eq=False)
class Row:
    """One rival on the test part and on the benchmark."""

    quality: TextScore  # On text, per block
    # (documents,) 1 for a wrong answer, over its domain's documents and the number of domains: the sum is one minus the
    # mean accuracy of the domains. Without documents (blocks,): wrong next tokens, over all tokens
    wrong: Tensor
    parameters: int = 0  # Trained ones

    @property
    def accuracy(self) -> float:
        """Mean over the benchmark's domains of the share of right answers, or the share of right next tokens."""
        return 1 - float(self.wrong.sum())

    def losses(self, what: str) -> Tensor:
        """Per block ``ce`` or ``kl``, or per document ``accuracy``, as something to lose."""
        return self.wrong if what == "accuracy" else getattr(self.quality, what)

    def describe(self) -> dict[str, float]:
        """As JSON."""
        return {**quality_as_json(self.quality), "accuracy": self.accuracy, "parameters": self.parameters}


@dataclass(frozen=True)
class Records:
    """Where the rows of one mixture are kept, one file each, while what ``decided`` them (a digest) is as it was."""

    folder: Path
    decided: str

    def row(self, name: str, seed: int, measured: Callable[[], Row]) -> Row:
        """A row that is kept, or that is measured now."""
        key = json_digest([self.decided, name, seed])
        path = self.folder / f"{key}.json"
        found = read_record(path)
        if found is None:
            row = measured()
            values = {f.name: getattr(row.quality, f.name).tolist() for f in fields(TextScore)}
            record = {"row": name, "seed": seed, **values, "wrong": row.wrong.tolist(), "parameters": row.parameters}
            keep_record(path, record)
            return row
        quality = TextScore(*(torch.tensor(found[f.name], dtype=torch.float64) for f in fields(TextScore)))
        return Row(quality, torch.tensor(found["wrong"], dtype=torch.float64), found["parameters"])


def records_of(folder: Path, model: str, text: TextParts, decided: Any) -> Records:
    """The records of a mixture; ``decided`` is what decides a row beside the model and the text, as plain data."""
    ids = [part.ids.tolist() for part in (text.train, text.held_out, text.test)]
    return Records(folder, json_digest([model_digest(model), json_digest(ids), decided, package_versions(DECIDING)]))
