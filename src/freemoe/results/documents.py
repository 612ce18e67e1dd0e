"""What commands print with ``--json``, typed: one document each, named and numbered by its ``schema``.

A number rises when a key that was there is called otherwise or means something else; more keys may come under the same number.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import ConfigDict, Field, create_model

from freemoe.results.build import BuildResult
from freemoe.results.common import ResultPart, RunResult
from freemoe.results.convert import ConvertResult
from freemoe.results.evaluation import EvaluationResult
from freemoe.results.trim import TrimResult


class OpenDocument(ResultPart):
    """A document to which systems add keys of their own."""

    model_config = ConfigDict(extra="allow", frozen=True)


class MadeDocument(ResultPart):
    """What a run made."""

    folder: str = Field(description="The artefact.")
    report: str = Field(description="Its report.html.")
    headlines: list[str] = Field(description="The verdict, in lines for people.")
    result: RunResult | None = Field(None, description="As in the artefact's result.json; left out with --summary.")


class BuiltDocument(MadeDocument):
    """``freemoe build`` and ``freemoe demo``."""

    result: BuildResult | None = None


class ConvertedDocument(MadeDocument):
    """``freemoe convert``."""

    result: ConvertResult | None = None


class TrimmedDocument(MadeDocument):
    """``freemoe trim``."""

    plans: str | None = Field(description="Picture of the plans that were measured.")
    result: TrimResult | None = None


class OwnTextDocument(OpenDocument):
    """``freemoe eval`` of an artefact on its own text."""

    tokens: int
    rows: dict[str, dict[str, Any]]
    set_aside: dict[str, Any]


class GeneratedDocument(ResultPart):
    """``freemoe generate``."""

    expert: str = Field(description="Which answered.")
    rejected: bool = Field(description="Whether the significance test rejected it, so that it is the base.")
    text: str | None = Field(description="The continuation; null in a dry run.")


class MergedDocument(OpenDocument):
    """``freemoe merge``."""

    folder: str
    gguf: str | None = None


class InspectedDocument(OpenDocument):
    """``freemoe inspect``."""

    kind: str = Field(description="Kind of artefact, or model.")


class ReportedDocument(ResultPart):
    """``freemoe report``."""

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
    """``freemoe bench --dry-run``."""

    artefact: str
    against: str | None
    sizes: dict[str, int]


class ArgumentsDocument(ResultPart):
    """``freemoe lm-eval --dry-run``."""

    arguments: list[str] = Field(description="Of lm_eval.")


class ErrorDocument(ResultPart):
    """Any command that refused, or was stopped."""

    error: str = Field(description="The message.")
    kind: str = Field(description="Class of the error, UsageError or Stopped.")
    exit_code: int


class PlanDocument(OpenDocument):
    """A dry run. The last word of a key is the unit of its number: bytes, seconds, tokens, share (0 to 1)."""

    output: str | None = Field(None, description="What would be written.")


class BuildPlanDocument(PlanDocument):
    """``freemoe build --dry-run`` and ``freemoe demo --dry-run``."""

    documents: dict[str, dict[str, int]] = Field(description="Per domain, those of the reference and reported split.")
    splits: list[str] = Field(description="Where they come from.")
    warnings: list[str] = Field(description="What the build would say before its first unit of work.")
    subdomains: int
    bands_per_subdomain: int
    candidate_bands: int
    purifications: int
    document_scores_to_search: int
    document_scores_to_report: int
    workers: int
    memory_bytes: int = Field(description="Of all processes at the largest moment, beside the libraries.")
    base_bytes: int
    above_the_base_bytes: dict[str, int] = Field(description="The largest moment of every stage.")
    fits: str
    time_of_one_document_seconds: float = Field(description="Measured on one batch.")
    time_by_stage_seconds: dict[str, float] = Field(description="By one worker, about; what takes none is left out.")
    time_of_one_worker_seconds: float = Field(description="Of the whole build by one worker, about.")


class ConvertPlanDocument(PlanDocument):
    """``freemoe convert --dry-run``."""

    text_tokens: dict[str, int]
    block_tokens: int
    steps: int
    step_tokens: int
    passes_over_the_text: float
    weights_of_linears: int
    active_weights_of_linears: int
    active_share: float
    trained_numbers: int
    training_bytes: int = Field(description="Of the trained numbers, their gradients and Adam's moments.")
    time_by_stage_seconds: dict[str, float] = Field(description="About; what takes none is left out.")
    time_on_this_processor_seconds: float


class TrimPlanDocument(PlanDocument):
    """``freemoe trim --dry-run``."""

    base: str
    experts_per_token: str
    mean_experts_per_token: float
    plan: str | None = Field(description="The plan that is given; null where one is searched.")
    search: str | None
    parameters: int
    active_parameters: int
    least_active_parameters: int = Field(description="Under the given plan, or one expert in every layer.")
    hook_layers: str | list[int]
    hook_units: int
    hook_parameters: int
    text_blocks: dict[str, int]
    block_tokens: int
    plans_measured_at_most: int
    compared_plans: int = Field(description="Of --compare, sweeps spelled out.")
    steps: int
    step_blocks: int
    loss: str
    control: bool
    cached_inputs_bytes: int
    time_by_stage_seconds: dict[str, float] = Field(description="At most, about; what takes none is left out.")
    time_on_this_processor_seconds: float


class EvalPlanDocument(PlanDocument):
    """``freemoe eval --dry-run``."""

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
    """``freemoe serve --dry-run``."""

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
    "build": BuiltDocument,
    "convert": ConvertedDocument,
    "trim": TrimmedDocument,
    "eval": EvaluationResult,
    "eval-text": OwnTextDocument,
    "generate": GeneratedDocument,
    "merge": MergedDocument,
    "inspect": InspectedDocument,
    "report": ReportedDocument,
    "ls": ListedDocument,
    "bench": BenchDocument,
    "error": ErrorDocument,
    "build-plan": BuildPlanDocument,
    "convert-plan": ConvertPlanDocument,
    "trim-plan": TrimPlanDocument,
    "eval-plan": EvalPlanDocument,
    "eval-text-plan": OwnTextPlanDocument,
    "merge-plan": PlanDocument,
    "serve-plan": ServePlanDocument,
    "bench-plan": BenchPlanDocument,
    "lm-eval-plan": ArgumentsDocument,
}


def _with_schema_name(command: str, document: type[ResultPart]) -> type[ResultPart]:
    name = cast(Any, Literal[f"freemoe.{command}/1"])
    found = create_model(document.__name__, __base__=document, schema_=(name, Field(alias="schema")))
    found.__doc__ = document.__doc__
    return found


DOCUMENTS: dict[str, type[ResultPart]] = {
    command: _with_schema_name(command, found) for command, found in _DOCUMENTS.items()
}
"""By the command; of a dry run, with ``-plan``."""
