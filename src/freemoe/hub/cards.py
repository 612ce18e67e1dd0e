"""What the model cards of all artefacts have in common: their front matter, and how they are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from freemoe.assets import BUNDLED, BUNDLED_MOE
from freemoe.core import neutral
from freemoe.core.ledger import openings_text
from freemoe.hub.fetch import is_repository
from freemoe.results.common import RunResult

HERE = "path/to/this/folder"
"""Stands in a card for the place of the artefact; pushing puts the repository's name there."""

_DATA = re.compile(r"hf:([\w.-]+/[\w.-]+)")


@dataclass(frozen=True)
class CardMetric:
    """One figure that the artefact reached on text that chose nothing."""

    domain: str  # What it was measured on
    metric: str  # Of the hub's names where there is one: ``accuracy``, ``perplexity``
    value: float  # The figure; of an accuracy per cent
    name: str  # What it is, for people


def card_header(
    base: str,  # Its name
    title: str,  # The card's title
    relation: str,  # Of the artefact to its base: ``adapter``, ``finetune``, ``merge`` or ``quantized``
    tags: Sequence[str],  # Beside ``freemoe``
    about: str,  # What it is, as Markdown
    measured: Iterable[CardMetric] = (),  # Figures for the model index
    data: Iterable[str] = (),  # Sources of text and tasks as the recipe names them; those of the hub are listed
) -> list[str]:
    """How a card begins, as lines: the YAML that the hub reads, the title, and what the artefact is.

    The base is named where it is a repository: a path of the machine it was made on says nothing to others, and the hub refuses
    it. No licence is named, as none is known: the base's holds.
    """
    from huggingface_hub import EvalResult, ModelCardData

    figures = [
        EvalResult(
            task_type="text-generation",
            dataset_type=neutral.one_line(figure.domain),
            dataset_name=neutral.one_line(figure.domain),
            metric_type=neutral.one_line(figure.metric),
            metric_name=neutral.one_line(figure.name),
            metric_value=round(figure.value, 4),
        )
        for figure in measured
    ]
    sets = list(dict.fromkeys(name for source in data for name in _DATA.findall(source)))
    card = ModelCardData(
        base_model=base.partition("@")[0] if is_repository(base) else None,
        base_model_relation=relation if is_repository(base) else None,
        library_name="freemoe",
        pipeline_tag="text-generation",
        tags=["freemoe", *tags],
        datasets=sets or None,
        metrics=sorted({figure.metric_type for figure in figures}) or None,
        model_name=neutral.one_line(title),
        eval_results=figures or None,
    )
    return ["---", *card.to_yaml().splitlines(), "---", "", f"# {neutral.escape_markdown(title)}", "", about, ""]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of a card, as lines."""
    lines = [f"| {' | '.join(map(neutral.escape_markdown, cells))} |" for cells in (header, *rows)]
    return [lines[0], f"|{'---|' * len(header)}", *lines[1:]]


def base_shown(base: str) -> str:
    """The base's name for a card: the repository's, else the last part of its path."""
    return base if is_repository(base) else Path(base).name


def card_notes(base: str, result: RunResult | None = None) -> list[str]:
    """What a card says of a preset, and where others cannot find the base by its name."""
    said = () if result is None else (*result.notes, *openings_text(result.cost.openings))
    notes = [line for note in said for line in (neutral.escape_markdown(note), "")]
    if found_by_others(base):
        return notes
    return [
        *notes,
        f"The base, {neutral.code_span(base_shown(base))}, was a folder or file of the machine that this was made on and not a repository, so the "
        "card's header names none. Whoever loads this on another machine names it: `base=`.",
        "",
    ]


def loading_example(base: str | None, name: str, more: str) -> list[str]:
    """The lines of Python that load an artefact and use it. Without a base it is an artefact that needs none."""
    given = "" if base is None or found_by_others(base) else ', base="path/to/the/base"'
    return ["```python", "import freemoe", "", f'{name} = freemoe.load("{HERE}"{given})', more, "```", ""]


def found_by_others(base: str) -> bool:
    """Whether a base's name leads to it on any machine."""
    return is_repository(base) or base in (BUNDLED, BUNDLED_MOE)
