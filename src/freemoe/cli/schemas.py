"""What commands print with ``--json``, typed: one document each, named and numbered by its ``schema``.

A number rises when a key that was there is called otherwise or means something else; more keys may come under the same number.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field, create_model

from freemoe.results.common import OpenDocument, PlanDocument, ResultPart
from freemoe.results.evaluation import EvaluationResult
from freemoe.systems import SYSTEMS


class OwnTextDocument(OpenDocument):
    """``freemoe eval`` of an artefact on its own text."""

    tokens: int
    rows: dict[str, dict[str, Any]]
    set_aside: dict[str, Any]


class GeneratedDocument(ResultPart):
    """What ``freemoe generate --json`` prints."""

    expert: str = Field(description="Which answered.")
    rejected: bool = Field(description="Whether the significance test rejected it, so that it is the base.")
    text: str | None = Field(description="The continuation; null in a dry run.")


class MergedDocument(OpenDocument):
    """What ``freemoe merge --json`` prints."""

    folder: str
    gguf: str | None = None


class InspectedDocument(OpenDocument):
    """What ``freemoe inspect --json`` prints."""

    kind: str = Field(description="Kind of artefact, or model.")


class ReportedDocument(ResultPart):
    """What ``freemoe report --json`` prints."""

    folder: str
    result: dict[str, Any] = Field(description="As result.json has it: see the schema of its kind.")


class ListedDocument(OpenDocument):
    """``freemoe ls``: per kind its rows, each with ``name`` and ``about``."""


class BenchDocument(ResultPart):
    """``freemoe bench``: seconds are medians, and ``times_as_fast`` is over the first side, with its 95 % interval."""

    sizes: dict[str, int] = Field(description="Tokens of prompt and answer, sequences of a batch, rounds.")
    requests: dict[str, dict[str, Any]] = Field(description="Side -> first_token and further_tokens.")
    switch: dict[str, Any] | None = Field(None, description="Seconds from expert to expert.")
    batch: dict[str, Any] | None = Field(None, description="Tokens per second of a batch under base and experts.")
    memory: dict[str, int]
    machine: dict[str, Any]


class BenchPlanDocument(ResultPart):
    """What ``freemoe bench --dry-run --json`` prints."""

    artefact: str
    against: str | None
    sizes: dict[str, int]


class ArgumentsDocument(ResultPart):
    """What ``freemoe lm-eval --dry-run --json`` prints."""

    arguments: list[str] = Field(description="Of lm_eval.")


class ErrorDocument(ResultPart):
    """Any command that refused, or was stopped."""

    error: str = Field(description="The message.")
    kind: str = Field(description="Class of the error, UsageError or Stopped.")
    exit_code: int


class EvalPlanDocument(PlanDocument):
    """What ``freemoe eval --dry-run --json`` prints."""

    artefact: str
    base: str
    documents: dict[str, int] = Field(description="Per domain, without those that are set aside.")
    experts: list[str]
    document_scores: int


class OwnTextPlanDocument(PlanDocument):
    """``freemoe eval --dry-run`` of an artefact on its own text."""

    artefact: str
    base: str
    text: str
    test_blocks: int = Field(description="Without those that are set aside.")
    block_tokens: int
    set_aside_blocks: int
    rows: list[str]
    forward_tokens: int


class ServePlanDocument(ResultPart):
    """What ``freemoe serve --dry-run --json`` prints."""

    base: str
    models: list[str] = Field(description="What a request can name as its model.")
    rejected: list[str] = Field(description="Those of them that the significance test rejected: they are the base.")
    dtype: str = Field(description="Of the weights, and of the key-value cache.")
    context_tokens: int
    slots: int = Field(description="Sequences that are written side by side.")
    slot_bytes: int = Field(description="Of the key-value cache, for one sequence of the whole context.")
    cache_bytes: int = Field(description="Of all slots; it grows to that as it is needed, in vLLM it is taken at once.")
    command: str | None = Field(None, description="Of vLLM's server, where that is the engine.")


_DOCUMENTS: dict[str, type[ResultPart]] = {
    **{
        system.command + part: found for system in map(SYSTEMS.get, SYSTEMS) for part, found in system.documents.items()
    },
    "eval": EvaluationResult,
    "eval-text": OwnTextDocument,
    "generate": GeneratedDocument,
    "merge": MergedDocument,
    "inspect": InspectedDocument,
    "report": ReportedDocument,
    "ls": ListedDocument,
    "bench": BenchDocument,
    "error": ErrorDocument,
    "eval-plan": EvalPlanDocument,
    "eval-text-plan": OwnTextPlanDocument,
    "merge-plan": PlanDocument,
    "serve-plan": ServePlanDocument,
    "bench-plan": BenchPlanDocument,
    "lm-eval-plan": ArgumentsDocument,
}


DOCUMENTS: dict[str, type[ResultPart]] = {
    command: create_model(
        document.__name__,
        __base__=document,
        __doc__=document.__doc__,
        schema_=(cast(Any, Literal[f"freemoe.{command}/1"]), Field(alias="schema")),
    )
    for command, document in _DOCUMENTS.items()
}
"""By the command; of a dry run, with ``-plan``."""
