"""The recipe of a dense model's conversion: `freemoe convert` (ToMoE)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from freemoe.core.registry import check_name
from freemoe.recipes import limits
from freemoe.recipes.sections import (
    Chat,
    Device,
    Dtype,
    GroupBy,
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

METHODS = ["tomoe", "static-magnitude", "static-activation", "activation-split"]
"""What ``method`` may name: learned gates, or a rival; one that is registered elsewhere adds its own."""


class GateSection(RecipeSection):
    """The learned gates of a conversion (ToMoE); `profile` sets what is not given here."""

    budget: Literal["exact", "loss"] = Field(
        default="exact",
        description="exact: every step keeps exactly the budget's best weights; loss: Gumbel thresholds and R_P (the paper).",
    )
    start: Literal["statistics", "random"] = Field(
        default="statistics",
        description="Begin at the squared gradients of the masks and at clusters of tokens, or at random.",
    )
    value_masks: Literal["tokens", "static"] = Field(
        default="tokens", description="V/O chosen per token or once for all."
    )
    query_masks: bool = Field(default=True, description="Prune Q/K dimensions too.")
    attention: Literal["dimensions", "heads"] = Field(
        default="dimensions",
        description="Prune dimensions of all heads alike, or whole heads for all tokens (ToMoE Tab. 13, Head Pruning; budget: "
        "loss).",
    )
    mlp_masks: Literal["shared", "tokens"] = Field(
        default="shared",
        description="One mask per expert and step, or one per token with noise of its own (the paper).",
    )
    mask_output: bool = Field(
        default=True, description="Mask the attention's output in training, as a converted model does."
    )
    mask_twice: bool = Field(
        default=False,
        description="Mask gate and up, so that a dropped neuron gets no gradient (the paper's Eq. 2, authors).",
    )
    local_embedding: bool = Field(default=True, description="Decode each token's own embedding for V/O.")
    expert_embedding: bool = Field(
        default=True, description="Add the mean of the expert embeddings in attention (ToMoE Tab. 13, Local Emb: off)."
    )
    train_inputs: bool = Field(default=False, description="Train the hypernetwork's input z too (authors).")
    noise: bool = Field(default=False, description="Gumbel noise in training.")
    export_noise: bool = Field(default=False, description="Draw the converted model's masks with noise too (authors).")
    temperature: float = Field(default=0.4, gt=0, le=1000, description="tau of the straight-through gradients.")
    offset: float = Field(
        default=3.0, ge=-1000, le=1000, description="b, added to logits: masks begin at one (budget: loss)."
    )
    keep: Literal["mean", "max"] = Field(
        default="mean", description="K: kept value dimensions over tokens (budget: loss)."
    )
    equal_widths: bool = Field(default=True, description="Raise every expert to the layer's largest width.")
    widen: Literal["uncovered", "own"] = Field(
        default="uncovered",
        description="By what an expert is raised: neurons that no expert has and then its own best, or its own best (authors).",
    )
    export: Literal["threshold", "share"] = Field(
        default="threshold",
        description="What is converted of logits: those above the threshold, or above the one that gives the active share asked "
        "for (budget: loss). Noise keeps more in training than a threshold does at its end.",
    )


class LossSection(RecipeSection):
    """Weights of the losses (ToMoE Eq. 8-12)."""

    distillation: float = Field(
        default=1.0, ge=0, le=limits.WEIGHT, description="KL to the dense model, or the loss of train.loss lm."
    )
    size: float = Field(default=16.0, ge=0, le=limits.WEIGHT, description="R_P (budget: loss).")
    union: float = Field(default=0.0, ge=0, le=limits.WEIGHT, description="R_U: every neuron is in some expert.")
    union_attention: bool = Field(
        default=False, description="R_U of the attention too: some token keeps every value dimension (the paper)."
    )
    balance: float = Field(
        default=0.05, ge=0, le=limits.WEIGHT, description="R_L: every expert gets its share of the tokens."
    )
    balance_form: Literal["soft", "gumbel", "hard"] = Field(
        default="soft",
        description="soft: N sum F P, P the router's softmax; gumbel: P of its Gumbel-softmax (the paper's Eq. 9); hard: sum F F "
        "(authors).",
    )
    size_smoothing: float = Field(
        default=0.0, ge=0, le=1, description="Added inside the logarithms of R_P and R_U (authors: 0.001)."
    )


class TrainSection(RecipeSection):
    """The training loop of a conversion."""

    steps: int = Field(default=200, ge=0, le=limits.STEPS, description="Training steps; the profile's if absent.")
    loss: Literal["kd", "lm"] = Field(
        default="kd", description="kd: divergence from the dense model; lm: the text's own next tokens."
    )
    batch_tokens: int = Field(default=4096, ge=2, le=limits.TOKENS, description="Tokens per step, about.")
    block: int | None = Field(
        default=None, ge=2, le=limits.TOKENS, description="Tokens of a block; 2048, or the model's context, if absent."
    )
    rate: float = Field(
        default=3e-4, gt=0, le=limits.RATE, description="Learning rate of hypernetwork, routers and decoders."
    )
    rate_steps: int = Field(
        default=60,
        ge=0,
        le=limits.STEPS,
        description="A training of more steps takes a smaller rate, as one over its steps, so that routers go as far in all; 0: "
        "the rate is the same for any number of steps.",
    )
    offset_rate: float = Field(
        default=3e-2, ge=0, le=limits.RATE, description="Learning rate of the logits' own offsets."
    )
    weight_decay: float = Field(default=0.0, ge=0, le=100, description="Of AdamW.")
    schedule: Literal["constant", "cosine"] = Field(
        default="cosine", description="Cosine falls to a tenth of the rates."
    )
    mean_window: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the steps so far that the mean of the gates looks back on; 0: no mean. It is scored beside the "
        "last step's gates.",
    )
    ramp: float = Field(
        default=0.0, ge=0, le=1, description="Share of the steps over which the budget falls to its end."
    )
    checkpointing: bool = Field(default=False, description="Make activations again in the backward pass: less memory.")
    evaluation_tokens: int = Field(
        default=65536, ge=1, le=2**30, description="Most tokens of the held-out and of the test part, each."
    )
    statistics_tokens: int = Field(
        default=65536,
        ge=1,
        le=2**30,
        description="Tokens of the statistics that training and rivals begin with, about.",
    )
    keep: Literal["best", "last"] = Field(
        default="best",
        description="The state that is converted: the best on held-out text, or the last one (the paper).",
    )
    save_every: int = Field(default=50, ge=1, le=limits.STEPS, description="Steps between two saved states.")


_PAPERS: dict[str, Any] = {"rate": 1e-3, "weight_decay": 0.05, "batch_tokens": 2048, "schedule": "constant"}
_PAPERS |= {"mean_window": 0.0, "rate_steps": 0, "keep": "last"}

_PROFILES: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "paper": {
        "gates": {
            "budget": "loss",
            "start": "random",
            "mlp_masks": "tokens",
            "noise": True,
            "mask_twice": True,
            "widen": "own",
            "export": "share",
        },
        "losses": {"union": 2.0, "union_attention": True, "balance": 1.0, "balance_form": "gumbel"},
        "train": {"steps": 10000, **_PAPERS},
    },
    "authors": {
        "gates": {
            "budget": "loss",
            "start": "random",
            "mlp_masks": "tokens",
            "noise": True,
            "export_noise": True,
            "train_inputs": True,
            "mask_output": False,
            "mask_twice": True,
            "keep": "max",
            "equal_widths": False,
        },
        "losses": {"distillation": 2.0, "union": 1.5, "balance": 1.0, "balance_form": "hard", "size_smoothing": 0.001},
        "train": {"steps": 20000, **_PAPERS},
    },
}


_PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "rivals": False,
        "train": {
            "steps": 40,
            "batch_tokens": 1024,
            "block": 512,
            "evaluation_tokens": 8192,
            "statistics_tokens": 8192,
            "save_every": 40,
        },
    },
    "thorough": {"train": {"steps": 1000, "evaluation_tokens": 262144, "statistics_tokens": 262144}},
}


class ConvertRecipe(Recipe):
    """Everything `freemoe convert` needs to make a dense model a token-level mixture (ToMoE)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"preset": _PRESETS, "profile": _PROFILES}
    SHORT: ClassVar[dict[str, str]] = {"speed": "timing.prompts"}

    command: Literal["convert"] = "convert"
    model: Model
    revision: Revision = None
    chat: Chat = "auto"
    group_by: GroupBy = None
    text: tuple[str, ...] = Field(
        default=(), max_length=1000, description="Text files, rows of any shape (docs/data.md), or hf:owner/name:split."
    )
    mix: Literal["paper", "wikitext", "authors"] | None = Field(
        default=None, description="A mix of data sets under data_root."
    )
    data_root: str | None = Field(default=None, description="Folder with the data sets; the hub if absent.")
    output: Output = "freemoe-converted"
    preset: Preset = "standard"
    seed: Seed = 0
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    place: Where = "local"
    workers: Workers = 1
    unit_seconds: UnitSeconds = None
    active: float = Field(default=0.5, gt=0, le=1, description="Share of the decoder's weights that a token uses.")
    experts: int = Field(
        default=8, ge=2, le=4096, description="Experts of every MLP; one expert is static pruning: method static-*."
    )
    method: str = Field(
        default="tomoe", description="tomoe, or a rival: static-magnitude, static-activation, activation-split."
    )
    profile: Literal["default", "paper", "authors"] = Field(
        default="default", description="Settings of gates, losses and training that are not given themselves."
    )
    mode: Literal["shared", "materialised", "pseudo"] = Field(default="shared", description="How it is written.")
    rivals: bool = Field(default=True, description="Also measure the rivals at the same active share.")
    gates: GateSection = GateSection()
    losses: LossSection = LossSection()
    train: TrainSection = TrainSection()
    timing: TimingSection = TimingSection()

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        return check_name("method", value, METHODS)

    @model_validator(mode="after")
    def _exact_needs_statistics(self) -> ConvertRecipe:
        if self.gates.budget == "exact" and self.gates.start == "random":
            raise ValueError("gates.budget exact needs gates.start statistics: they settle the widths of the layers")
        if self.gates.budget == "exact" and self.gates.mlp_masks == "tokens":
            raise ValueError("gates.mlp_masks tokens needs gates.budget loss; an exact budget has one mask per expert")
        if self.gates.budget == "exact" and self.gates.attention == "heads":
            raise ValueError("gates.attention heads needs gates.budget loss: the statistics rank dimensions, not heads")
        if self.gates.export == "share" and self.gates.budget == "exact":
            raise ValueError(
                "gates.export share needs gates.budget loss: an exact budget has the share that was asked for"
            )
        if self.gates.export == "share" and (self.gates.export_noise or self.gates.keep == "max"):
            raise ValueError(
                "gates.export share counts the mean K without noise: leave out gates.export_noise and keep max"
            )
        return self

    @model_validator(mode="after")
    def _some_text(self) -> ConvertRecipe:
        if not self.text and self.mix is None:
            raise ValueError("no text is given: --text FILE, or --mix NAME with --data-root FOLDER")
        return self
