"""The section of a recipe that says where documents come from and how generated answers are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from freemoe.recipes import limits
from freemoe.recipes.expert_names import name_fault
from freemoe.recipes.sections import Chat, GroupBy, Recipe, RecipeSection


class DataSection(RecipeSection):
    """Where documents come from and how many are read."""

    root: str | None = Field(default=None, description="Folder with the benchmarks' original files; hub if absent.")
    limit: int | None = Field(default=None, ge=1, le=limits.DOCUMENTS, description="Documents per task and split.")
    fewshot: int | None = Field(
        default=None, ge=0, le=1000, description="Few-shot examples; each task's own default if absent."
    )
    overflow: Literal["truncate", "error"] = Field(
        default="truncate", description="Prompts longer than the context: cut from the left as lm-eval does, or refuse."
    )
    allow_code_execution: bool | Literal["unsafe"] = Field(
        default=False,
        description="Run generated code inside bubblewrap; =unsafe: without it too, where it does not start.",
    )
    samples: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Code tasks: programs written for every problem; if absent, as many as pass_at.",
    )
    temperature: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Code tasks: of the sampling; if absent, 0.8 for several samples, 0 (greedy) for 1.",
    )
    top_p: float = Field(
        default=0.95, gt=0, le=1, description="Code tasks: share of the probability that is sampled from."
    )
    pass_at: Literal[1, 10, 100] = Field(
        default=1, description="Code tasks: which pass@k is searched and reported; the others stand beside it."
    )
    estimator: Literal["unbiased", "first"] = Field(
        default="unbiased",
        description="Code tasks: pass@k of all samples (Chen et al. 2021), or of the first k alone (MoDE Eq. 12).",
    )
    chat: Chat = "auto"
    group_by: GroupBy = None
    text_given: int = Field(
        default=0,
        ge=0,
        le=limits.TOKENS,
        description="Tokens at the start of a block of text that are context only; 0: the beginning-of-text token "
        "stands before the block, as lm-eval has it.",
    )
    task_folder: str | None = Field(
        default=None, description="Folder of further lm-eval tasks: YAML files for lm_eval:NAME."
    )
    fewshot_draw: Literal["task", "document"] = Field(
        default="task",
        description="Few-shot examples: one draw for all documents of a task, or anew for every document as lm-eval draws them.",
    )

    @model_validator(mode="after")
    def _enough_samples(self) -> DataSection:
        drawn = self.samples or self.pass_at
        if drawn > 1 and self.temperature == 0:
            raise ValueError(
                f"temperature is 0, which makes all {drawn} samples alike; leave it out, or take samples=1"
            )
        if self.pass_at > drawn:
            raise ValueError(f"pass_at is {self.pass_at}, and samples {drawn}: at least {self.pass_at} are needed")
        return self


def _task_lists(value: object) -> object:
    """Let a domain's one task stand without a list."""
    if not isinstance(value, dict):
        return value
    if not value:
        raise ValueError("no domain is given; name one as NAME=TASK")
    return {name: (tasks,) if isinstance(tasks, str) else tasks for name, tasks in value.items()}


def _named_domains(value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    for name, tasks in value.items():
        fault = name_fault(name)
        if not name.replace("-", "").replace("_", "").isalnum():
            fault = "may hold letters, digits, '-' and '_' only"
        elif len(name) > limits.NAME:
            fault = f"has {len(name):,} characters; at most {limits.NAME} are allowed"
        if fault:
            raise ValueError(f"domain name {name!r:.80} {fault}")
        if not tasks:
            raise ValueError(f"domain {name!r} names no task")
    return value


Domains = Annotated[
    dict[str, Annotated[tuple[str, ...], Field(max_length=1000)]],
    BeforeValidator(_task_lists),
    AfterValidator(_named_domains),
    Field(
        max_length=1000,
        description="Name of each domain and its tasks: FILE.jsonl, text:FILE, the name of a benchmark (freemoe ls tasks).",
    ),
]


class DomainRecipe(Recipe):
    """A recipe of runs over domains of tasks."""

    if TYPE_CHECKING:
        # Each recipe declares them itself, in the order in which a dumped recipe has them.
        domains: Domains
        seed: int | None
        batch_tokens: int
        data: DataSection
