"""Keeps documents that an artefact's making has seen out of its evaluations.

`keep_record` writes the hashes of `seen` beside an artefact, `read_record` finds them again together with the artefact's seed,
and `set_aside` takes what was seen out of a domain's reported split, with a count.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freemoe.core import neutral
from freemoe.core.artifacts import MANIFEST, ArtefactManifest, read_manifest
from freemoe.core.errors import DataError
from freemoe.core.files import write_atomic
from freemoe.core.numbers import format_percent
from freemoe.evals.seen import WHY, SeenHashes
from freemoe.evals.tasks.documents import Document
from freemoe.evals.tasks.task import DomainData
from freemoe.recipes import EvalRecipe, load_recipe
from freemoe.results import read_result
from freemoe.results.common import SeenRecord

if TYPE_CHECKING:
    from freemoe.text.blocks import PackedBlocks

SEEN_FILE = "seen.safetensors"

_SAID = {
    "key": "by content key",
    "question": "as the same question with the same answer",
    "text": "as text that overlaps",
}


@dataclass(frozen=True)
class ProvenanceRecord:
    """What is known of an artefact's making."""

    folder: str
    seed: int  # Of its recipe: its splits were carved with it
    seen: SeenHashes | None  # Hashes of what it saw; None for an artefact that was written before they were kept
    manifest_entry: dict[str, Any] = field(default_factory=dict)  # What its manifest says of them

    def as_json(self) -> dict[str, Any]:
        """As an evaluation's ``result.json`` has it."""
        return {"known": self.seen is not None, "seed": self.seed, **self.manifest_entry}

    def missing_record_warning(self) -> str:
        """What to say where nothing is known of what it saw."""
        return (
            f"warning: {self.folder!r} carries no record of the documents that its making saw (an older freemoe or save_pretrained wrote it), so "
            f"none can be set aside. Only files with a reported part of their own, or the artefact's own seed {self.seed} and "
            "files, give held-out documents. Build it anew for a record."
        )


def keep_record(folder: Path, seen: SeenHashes) -> dict[str, Any]:
    """Write hashes into an unfinished artefact, before its manifest.

    Gives what manifest and result say of it.
    """
    data = seen.to_bytes()
    write_atomic(folder / SEEN_FILE, data)
    return {"file": SEEN_FILE, **seen.as_json(), "bytes": len(data)}


def keep_text_record(
    folder: Path, tokenizer: Any, seen_blocks: Sequence[PackedBlocks], test_blocks: PackedBlocks, questions: SeenHashes
) -> dict[str, Any]:
    """`keep_record` for packed text: all of ``seen_blocks``, also where training stops before their end, and questions.

    What is in ``test_blocks`` too, which are reported, counts as not seen.
    """
    # With torch, which who reads a record (the report) does without.
    from freemoe.text.blocks import row_texts

    texts = itertools.chain.from_iterable(row_texts(tokenizer, blocks) for blocks in seen_blocks)
    seen = SeenHashes.from_texts(texts, row_texts(tokenizer, test_blocks))
    return keep_record(folder, seen.union_with(questions))


def read_shared(folder: Path) -> ArtefactManifest:
    """Check an artefact's files, and open those that every system writes: result, recipe, record of what was seen.

    ``folder``: the artefact; one that was put together by hand has none of them.

    Raises:
        FreeMoEError: One of them is not what its reader takes.
    """
    manifest = read_manifest(folder)
    read_record(folder, manifest)
    if "result.json" in manifest["files"]:
        read_result(folder)
    return manifest


def read_record(folder: str | Path, manifest: ArtefactManifest | None = None) -> ProvenanceRecord | None:
    """The record of an artefact; None for a folder or a name that is none, such as a plain model.

    ``manifest``: its manifest, where its files were checked already.

    Raises:
        ArtifactError: A damaged artefact.
    """
    root = Path(folder)
    if manifest is None and not (root / MANIFEST).is_file():
        return None
    manifest = manifest or read_manifest(root)
    seed = int(getattr(load_recipe(root / "recipe.yaml"), "seed", 0) or 0) if (root / "recipe.yaml").is_file() else 0
    said = manifest.get("seen")
    seen = None if said is None else SeenHashes.from_bytes((root / said["file"]).read_bytes())
    return ProvenanceRecord(str(folder), seed, seen, dict(said or {}))


def resolve_seed(recipe: EvalRecipe, record: ProvenanceRecord | None) -> EvalRecipe:
    """The recipe with its seed settled: its own, else the artefact's, else 0."""
    if recipe.seed is not None:
        return recipe
    return recipe.model_copy(update={"seed": 0 if record is None else record.seed})


def set_aside(data: DomainData, record: ProvenanceRecord | None) -> tuple[DomainData, dict[str, Any]]:
    """Take what the artefact's making saw out of a domain's reported documents.

    ``record``: of the artefact; nothing is set aside without one. Gives the domain with what is left and a note, and
    counts: ``documents`` set aside, ``of`` how many, and ``by`` what.

    Raises:
        DataError: Nothing is left.
    """
    total = len(data.reported)
    if record is None or record.seen is None:
        return data, {"documents": 0, "of": total, "by": {}}
    seen = record.seen
    reasons: list[str] = []

    def unseen_mask(documents: Sequence[Document]) -> list[bool]:
        reasons.extend(map(seen.seen_reason, documents))
        return [not reason for reason in reasons]

    left = data.reported.filter_documents(unseen_mask)
    by = Counter(reason for reason in reasons if reason)
    found = {"documents": total - len(left), "of": total, "by": {why: by[why] for why in WHY if by[why]}}
    if not found["documents"]:
        return data, found
    said = set_aside_text(found)
    if not len(left):
        raise DataError(
            f"Domain {data.name!r}: {said}; nothing is left to report on. The making of {record.folder!r} has seen it all. "
            f"Name documents of their own (REF.jsonl::TEST.jsonl, text:FILE::TESTFILE), or leave --seed out: the artefact's "
            f"own seed is {record.seed}."
        )
    return replace(data, reported=left, notes=(*data.notes, said)), found


def set_aside_text(counts: dict[str, Any]) -> str:
    """Counts of `set_aside` in words."""
    by = ", ".join(f"{count} {_SAID[why]}" for why, count in counts["by"].items())
    return f"{counts['documents']} of {counts['of']} reported documents set aside, as the artefact's making saw them ({by})"


def record_text(record: SeenRecord | None) -> str:
    """What an artefact carries of what it saw, for reports and cards."""
    if not record:
        return "No record of the documents that its making saw: written by an older freemoe."
    hashes = record.hashes
    share = "" if record.share_of_runs >= 1 else f", {format_percent(record.share_of_runs)} of its runs of words"
    return (
        f"{neutral.code_span(record.file)} ({record.bytes:,} bytes) knows the {record.documents:,} documents or pieces of text that the "
        f"making of this artefact saw, by {hashes['keys']:,} content keys, {hashes['questions']:,} questions and "
        f"{hashes['runs']:,} runs of words of plain text{share}; `freemoe eval` sets them aside."
    )
