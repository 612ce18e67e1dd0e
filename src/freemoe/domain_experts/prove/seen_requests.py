"""Recognises requests of lm-eval on documents that the making of an artefact saw.

lm-eval scores what it scores: no document can be taken out from here. So they are counted, told loudly, and refused on demand.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from freemoe.core.artifacts import MANIFEST, read_manifest
from freemoe.core.errors import DataError, RecipeError
from freemoe.evals.held_out import ProvenanceRecord
from freemoe.evals.seen import SeenHashes

ALLOWED = ("warn", "refuse")
Kind = Literal["continuation", "text", "generation"]

_LOG = logging.getLogger("freemoe")


def is_model(folder: Any) -> bool:
    """Whether an artefact is a model of its own (a converted one), not experts for another."""
    if not isinstance(folder, str | Path):
        return False
    root = Path(folder)
    whole = (root / MANIFEST).is_file() and (root / "config.json").is_file()
    return whole and read_manifest(root)["kind"] == "converted"


class SeenRequestCounter:
    """Counts documents by task, and those among them that were seen.

    ``record`` is None for a plain model, which has seen nothing that we know of; ``on_seen`` is ``warn`` or ``refuse``.

    Raises:
        RecipeError: Another value.
    """

    def __init__(self, record: ProvenanceRecord | None, on_seen: str = "warn") -> None:
        if on_seen not in ALLOWED:
            raise RecipeError(f"seen is {on_seen!r}; allowed: {', '.join(ALLOWED)}.")
        self.record, self.on_seen = record, on_seen
        self.requested: dict[str, set[Any]] = {}
        self.seen: dict[str, set[Any]] = {}
        if record is not None and record.seen is None:
            _LOG.warning(record.missing_record_warning())

    def check_requests(self, requests: Sequence[Any], kind: Kind) -> None:
        """Look at requests before they are answered.

        ``kind``: their arguments are a context and its continuation, a whole text, or a context to go on from.

        Raises:
            DataError: When one was seen, and that is refused.
        """
        if self.record is None or self.record.seen is None:
            return
        known: dict[tuple[Any, ...], bool] = {}
        fresh = 0
        for place, request in enumerate(requests):
            task = str(getattr(request, "task_name", None) or "requests")
            name = getattr(request, "doc_id", None)
            name = place if name is None else name
            self.requested.setdefault(task, set()).add(name)
            arguments = tuple(a for a in request.args if isinstance(a, str))
            if arguments not in known:
                known[arguments] = is_seen_request(self.record.seen, arguments, kind, getattr(request, "doc", None))
            if known[arguments] and name not in self.seen.setdefault(task, set()):
                self.seen[task].add(name)
                fresh += 1
        if not fresh:
            return
        if self.on_seen == "refuse":
            raise DataError(
                f"{self._seen_summary()}. They are no held-out documents: evaluate with freemoe eval, which sets them aside, choose "
                "another task, or count them with seen=warn."
            )
        _LOG.warning("WARNING: %s. lm-eval's figures are not held out for them.", self._seen_summary())

    def _seen_summary(self) -> str:
        counts = (
            f"{len(names)} of {len(self.requested[task])} documents of {task!r}"
            for task, names in self.seen.items()
            if names
        )
        assert self.record is not None
        return f"The making of {self.record.folder!r} saw " + ", ".join(counts)

    def describe(self) -> dict[str, Any]:
        """What lm-eval writes beside its results: documents asked for and seen, by task."""
        if self.record is None:
            return {}
        if self.record.seen is None:
            return {"seen_documents": "unknown: " + self.record.missing_record_warning()}
        return {
            "seen_documents": {
                task: {"seen": len(self.seen.get(task, ())), "of": len(names)} for task, names in self.requested.items()
            }
        }


def is_seen_request(seen: SeenHashes, arguments: Sequence[str], kind: Kind, doc: Any) -> bool:
    """Whether a request's document was seen: as a question at the end of its context, or by its text.

    Few-shot examples do not count: of a context only its end is looked at, and lm-eval's own copy of the document.
    """
    if kind == "text":
        return any(seen.has_text(text) for text in arguments)
    answer = (arguments[1] if len(arguments) > 1 else "") if kind == "continuation" else None
    if seen.has_question(arguments[0], answer):
        return True
    texts = list(_iter_texts(doc))
    for text in texts:
        # A template may ask otherwise than by the right answer's own text: its letter, or the choices before it.
        if seen.has_question(text, None) and (answer is None or any(seen.has_question(text, t) for t in texts)):
            return True
    return any(seen.has_text(text) for text in texts or [arguments[0].rsplit("\n\n", 1)[-1]])


def _iter_texts(value: Any) -> Iterator[str]:
    """Every text in a document of lm-eval."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _iter_texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _iter_texts(part)
