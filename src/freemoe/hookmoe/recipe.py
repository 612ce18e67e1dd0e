"""The recipe of a leaner mixture: `freemoe trim` (HookMoE)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from freemoe.recipes import limits
from freemoe.recipes.sections import (
    Chat,
    Device,
    Dtype,
    GroupBy,
    LayerNumber,
    Model,
    Output,
    Preset,
    Recipe,
    RecipeSection,
    Revision,
    Seed,
    Threads,
    TimingSection,
    UnitSeconds,
    Where,
    Workers,
)


class PlanSection(RecipeSection):
    """How many experts each layer runs (HookMoE Sec. 3.3)."""

    given: str | None = Field(
        default=None, description="uniform:K, tlnle:K,L, expert_n:K,L,R, or one K per layer; searched if absent."
    )
    act: float | None = Field(
        default=None, ge=1, le=4096, description="Search: most experts per token and layer, averaged over layers."
    )
    search: Literal["knapsack", "two_stage"] = Field(
        default="knapsack", description="knapsack: profile of every layer and k; two_stage: the paper's."
    )
    score: Literal["kl", "perturbation"] = Field(
        default="kl", description="What a profile measures: held-out KL, or outputs on random inputs."
    )
    best: int = Field(default=2, ge=1, le=1000, description="Knapsack plans measured per Act.")
    swaps: int = Field(
        default=24,
        ge=0,
        le=100_000,
        description="Plans measured at most in moving single experts between layers, after the knapsack.",
    )
    compare: tuple[str, ...] = Field(
        default=(),
        max_length=1000,
        description="Plans and rules per token to measure on the test part beside the one taken, without hooks: a plan, sweep:G, "
        "top_p:P, rel_threshold:T, naee.",
    )
    tolerance: float = Field(
        default=0.05, gt=0, le=1000, description="Search without an Act: held-out KL in nats that is allowed."
    )
    rescale: Literal["auto", "none", "kept_mass", "renorm"] = Field(
        default="auto",
        description="Weights of the experts that stay: the model's rule, as at full k, or to the full sum; auto measures each plan.",
    )

    @model_validator(mode="after")
    def _one_way(self) -> PlanSection:
        if self.given is not None and self.act is not None:
            raise ValueError(f"plan {self.given!r} and act {self.act:g} are both given; give one of them")
        if self.search == "two_stage" and self.act is not None:
            raise ValueError("two_stage searches by tolerance, not by act; give a tolerance, or search with knapsack")
        if self.search == "two_stage" and self.score != "kl":
            raise ValueError("two_stage measures whole plans: its score is kl")
        return self


class HookSection(RecipeSection):
    """What is put before (or beside) the mixture blocks (HookMoE Eq. 6)."""

    layers: Literal["all", "one", "none"] | Annotated[tuple[LayerNumber, ...], Field(max_length=limits.LAYERS)] = Field(
        default="all", description="all reduced layers, one (where most is lost, or l*), none, or layer numbers."
    )
    units: int | None = Field(
        default=None,
        ge=1,
        le=2**24,
        description="Hidden units of all hooks together; if absent a twelfth of the work that the plan saves (one hook: half the paper's).",
    )
    scope: Literal["block", "routed"] = Field(default="block", description="routed: shared experts see the raw input.")
    position: Literal["pre", "parallel"] = Field(
        default="parallel", description="parallel: beside the block; pre: before it, the paper's."
    )
    start: Literal["zero", "ridge"] | None = Field(
        default=None, description="ridge: closed form, for parallel hooks, and theirs if absent; zero: W2 = 0."
    )
    bias: bool = Field(default=False, description="Whether hooks have biases.")

    @model_validator(mode="after")
    def _closed_form(self) -> HookSection:
        if self.start == "ridge" and self.position == "pre":
            raise ValueError(
                "start ridge needs position parallel: what a block's input should become has no closed form"
            )
        return self

    @property
    def start_method(self) -> str:
        """How hooks start: what was asked for, or what their position allows."""
        return self.start or ("ridge" if self.position == "parallel" else "zero")


class HookTraining(RecipeSection):
    """How hooks are trained (HookMoE Sec. 3.3)."""

    loss: Literal["kd", "lm", "state"] = Field(
        default="kd",
        description="kd: KL from the same weights at full k; lm: the paper's; state: the last hidden state.",
    )
    steps: int = Field(default=1000, ge=1, le=limits.STEPS, description="Steps of training.")
    rows: int = Field(default=8, ge=1, le=2**16, description="Blocks per step.")
    rate: float | None = Field(
        default=None,
        gt=0,
        le=limits.RATE,
        description="Highest learning rate; over the hidden size, 0.3 for parallel hooks and 0.1 for pre, if absent.",
    )
    every: int = Field(default=100, ge=1, le=limits.STEPS, description="Steps between two looks at the held-out text.")
    block: int = Field(default=512, ge=8, le=limits.TOKENS, description="Tokens of a block.")
    samples: Literal["packed", "contiguous"] = Field(
        default="packed",
        description="packed: passages one behind the other; contiguous: every block from inside one article or row (the paper's "
        "samples).",
    )
    limit: int = Field(default=512, ge=1, le=limits.DOCUMENTS, description="Blocks of the training part at most.")
    held_out: int = Field(default=64, ge=1, le=limits.DOCUMENTS, description="Blocks of the held-out part at most.")
    test: int = Field(default=128, ge=1, le=limits.DOCUMENTS, description="Blocks of the test part at most.")
    top: int = Field(
        default=64, ge=1, le=2**20, description="Tokens of the full model's distribution kept per position."
    )
    checkpointing: bool = Field(default=False, description="Make activations again in the backward pass: less memory.")
    control: bool = Field(default=True, description="Also train the same hooks with k unreduced.")


_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "quick": {
        "plan": {"best": 1, "swaps": 0},
        "training": {
            "steps": 60,
            "rows": 4,
            "every": 30,
            "block": 256,
            "limit": 64,
            "held_out": 16,
            "test": 32,
            "control": False,
        },
        "timing": {"rounds": 3},
    },
    "thorough": {
        "plan": {"best": 4, "swaps": 96},
        "training": {"steps": 3000, "limit": 2048, "held_out": 256, "test": 512},
        "timing": {"rounds": 10},
    },
}


_PROFILES: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "paper": {
        "plan": {"search": "two_stage", "rescale": "none"},
        "hooks": {"layers": "one", "position": "pre"},
        "training": {"loss": "lm", "rate": 1e-4, "block": 2048, "limit": 512, "samples": "contiguous"},
    },
}


class TrimRecipe(Recipe):
    """Everything `freemoe trim` needs to plan, hook and prove a leaner mixture."""

    SETTINGS: ClassVar[dict[str, Any]] = {"preset": _PRESETS, "profile": _PROFILES}
    SHORT: ClassVar[dict[str, str]] = {"plan": "plan.given", "hooks": "hooks.layers", "speed": "timing.prompts"}

    command: Literal["trim"] = "trim"
    model: Model
    revision: Revision = None
    chat: Chat = "auto"
    group_by: GroupBy = None
    text: str = Field(
        description="Text file, rows of any shape (docs/data.md), hf:owner/name:split, or demo: for the bundled world's documents."
    )
    output: Output = "freemoe-trimmed"
    preset: Preset = "standard"
    profile: Literal["default", "paper"] = Field(
        default="default", description="Settings of plan, hooks and training that are not given themselves."
    )
    seed: Seed = 0
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    place: Where = "local"
    workers: Workers = 1
    unit_seconds: UnitSeconds = None
    plan: PlanSection = PlanSection()
    hooks: HookSection = HookSection()
    training: HookTraining = HookTraining()
    timing: TimingSection = TimingSection()
