"""What the model cards of all artefacts have in common: their front matter, and how they are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freemoe.assets import BUNDLED, BUNDLED_MOE
from freemoe.core import neutral
from freemoe.core.ledger import openings_text
from freemoe.hub.fetch import is_repository

HERE = "path/to/this/folder"
"""Stands in a card for the place of the artefact; pushing puts the repository's name there."""

_DATA = re.compile(r"hf:([\w.-]+/[\w.-]+)")


@dataclass(frozen=True)
class Measured:
    """One figure that the artefact reached on text that chose nothing.

    Attributes:
        domain: What it was measured on.
        metric: Of the hub's names where there is one: ``accuracy``, ``perplexity``.
        value: The figure; of an accuracy per cent.
        name: What it is, for people.
    """

    domain: str
    metric: str
    value: float
    name: str


def front_matter(
    result: dict[str, Any],
    title: str,
    relation: str,
    tags: Sequence[str],
    measured: Iterable[Measured],
    data: Iterable[str] = (),
) -> list[str]:
    """The YAML that opens a card, as lines; the hub reads it.

    The base is named where it is a repository: a path of the machine it was made on says nothing to others, and the hub refuses
    it. No licence is named, as none is known: the base's holds.

    Args:
        result: The artefact's ``result.json``.
        title: The card's title.
        relation: Of the artefact to its base: ``adapter``, ``finetune``, ``merge`` or ``quantized``.
        tags: Beside ``freemoe``.
        measured: Figures for the model index.
        data: Sources of text and tasks as the recipe names them; those of the hub are listed.
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
    base = result["base"]["name"]
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
    return ["---", *card.to_yaml().splitlines(), "---", ""]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of a card, as lines."""
    lines = [f"| {' | '.join(map(neutral.markdown, cells))} |" for cells in (header, *rows)]
    return [lines[0], f"|{'---|' * len(header)}", *lines[1:]]


def base_shown(result: dict[str, Any]) -> str:
    """The base's name for a card: the repository's, else the last part of its path."""
    name = str(result["base"]["name"])
    return name if is_repository(name) else Path(name).name


def card_notes(result: dict[str, Any]) -> list[str]:
    """What a card says of a preset, and where others cannot find the base by its name."""
    said = (*result.get("notes", ()), *openings_text(result.get("cost", {}).get("openings")))
    notes = [line for note in said for line in (neutral.markdown(note), "")]
    if found_by_others(result["base"]["name"]):
        return notes
    return [
        *notes,
        f"The base, {neutral.code(base_shown(result))}, was a folder or file of the machine that this was made on and not a repository, so the "
        "card's header names none. Whoever loads this on another machine names it: `base=`.",
        "",
    ]


def loading(result: dict[str, Any], name: str, more: str) -> list[str]:
    """The lines of Python that load an artefact and use it.

    Args:
        result: The artefact's ``result.json``.
        name: What the loaded artefact is called.
        more: The line that uses it.
    """
    own = found_by_others(result["base"]["name"]) or result["kind"] == "converted"
    base = "" if own else ', base="path/to/the/base"'
    return ["```python", "import freemoe", "", f'{name} = freemoe.load("{HERE}"{base})', more, "```", ""]


def found_by_others(base: str) -> bool:
    """Whether a base's name leads to it on any machine."""
    return is_repository(base) or base in (BUNDLED, BUNDLED_MOE)
