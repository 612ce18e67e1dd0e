"""Frozen recipes, one per command. A recipe, a YAML file and a command line are three spellings of the same thing.

Unknown keys are errors that name the path. `dump` and `load_recipe` are inverse to each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from freemoe.errors import RecipeError
from freemoe.registry import unknown_name

METRICS = ("saliency", "wanda", "magnitude", "random")

# numpy and scikit-learn take no seed outside this range.
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(_Section):
    """Where documents come from and how many are read."""

    root: str | None = Field(default=None, description="Folder with the benchmarks' original files; hub if absent.")
    limit: int | None = Field(default=None, ge=1, description="Documents per task and split.")
    fewshot: int | None = Field(default=None, ge=0, description="Few-shot examples; each task's own default if absent.")
    overflow: Literal["truncate", "error"] = Field(
        default="truncate", description="Prompts longer than the context: cut from the left as lm-eval does, or refuse."
    )
    allow_code_execution: bool = Field(default=False, description="Run generated code in the sandbox.")
    text_given: int = Field(
        default=0,
        ge=0,
        description="Tokens at the start of a block of text that are context only; 0: the beginning-of-text token "
        "stands before the block, as lm-eval has it.",
    )


class SubdomainSection(_Section):
    """How a domain is divided (MoDE Eq. 3-4)."""

    by: Literal["kmeans", "task", "field", "none"] = "kmeans"
    count: int | dict[str, int] | None = Field(
        default=None,
        description="Clusters per domain, one number or one per domain. If absent: 1 per 40 documents, at most 8; 1 for text.",
    )
    min_size: int = Field(default=8, ge=2, description="Smaller clusters are merged into the nearest.")
    initialisations: int = Field(default=10, ge=1)
    feature: Literal["embedding", "hidden"] = "embedding"

    @field_validator("count")
    @classmethod
    def _positive(cls, value: int | dict[str, int] | None) -> int | dict[str, int] | None:
        numbers = list(value.values()) if isinstance(value, dict) else [value] if value is not None else []
        if any(n < 1 for n in numbers):
            raise ValueError("a domain has at least 1 subdomain")
        return value


class BandSection(_Section):
    """The grid of bands (MoDE Eq. 6, Algorithm 1): shares of the ascending importance ranking, 0 = least important."""

    start: float = Field(default=0.0, ge=0, lt=1, description="theta_init")
    end: float = Field(default=1.0, gt=0, le=1, description="theta_max")
    step: float = Field(default=0.1, gt=0, le=1, description="delta_theta")
    ratio: float = Field(default=0.1, gt=0, le=1, description="width of a band (the papers' pruning ratio)")
    p: Literal["1", "2", "4", "inf"] = Field(default="2", description="norm of the input features (MoDE Table 2)")
    scope: Literal["row", "layer"] = Field(
        default="row", description="row: MoDE; layer: Free-MoE, one ranking per matrix"
    )
    sublayers: Literal["attention", "mlp", "both"] = "both"
    layers: tuple[int, int] | None = Field(default=None, description="Layers [first, last) that are touched.")
    patch: Literal[1, 2, 4, 16] = Field(default=1, description="Side of the square patches (MoDE Table 5).")

    @field_validator("p", mode="before")
    @classmethod
    def _name_of_p(cls, value: object) -> object:
        return str(value)

    @model_validator(mode="after")
    def _range(self) -> BandSection:
        if self.layers is not None and not 0 <= self.layers[0] < self.layers[1]:
            raise ValueError(f"layers is {list(self.layers)}; it is [first, last) with 0 <= first < last")
        if self.end <= self.start:
            raise ValueError(f"bands end at {self.end}, which is not above their start {self.start}")
        if self.start + self.ratio > 1 + 1e-9:
            raise ValueError(f"the first band [{self.start}, {self.start + self.ratio}) reaches above 1")
        return self

    def edges(self) -> list[tuple[float, float]]:
        """Every band [a, b) of the grid that begins below ``end`` and ends at or below 1, without rounding drift."""
        bands: list[tuple[float, float]] = []
        i = 0
        while True:
            a = round(self.start + i * self.step, 6)
            b = round(a + self.ratio, 6)
            if b > 1 + 1e-9 or a >= self.end - 1e-9:
                return bands
            bands.append((a, min(b, 1.0)))
            i += 1


class SaliencySection(_Section):
    """Signed purification: weights ranked by w * dL/dw, switched off greedily or with learned switches."""

    method: Literal["auto", "greedy", "learned"] = Field(
        default="auto", description="auto: learned for plain text, greedy for tasks."
    )
    budget: float = Field(default=0.01, gt=0, le=1, description="Largest share of the weights that may be off.")
    patience: int = Field(
        default=8, ge=1, description="Rounds without a better loss on the stopping documents before the end."
    )
    checkpointing: bool = Field(
        default=False, description="Make activations again in the backward pass: less memory, about a third slower."
    )
    step: float = Field(
        default=5e-5, gt=0, lt=1, description="Greedy: share of the weights switched off per round, for tasks."
    )
    text_step: float = Field(
        default=3e-4, gt=0, lt=1, description="Greedy: the same for plain text, whose loss sits at every token."
    )
    part_tokens: int = Field(
        default=12288,
        ge=1,
        description="Greedy: answer tokens per part; every part of a round ranks anew and switches off its share.",
    )
    candidates: float = Field(
        default=0.1, gt=0, le=1, description="Learned: share of the weights that gets a switch; at least the budget."
    )
    steps: int = Field(default=600, ge=1, description="Learned: most steps of training.")
    step_tokens: int = Field(default=2048, ge=1, description="Learned: answer tokens per step, about.")
    every: int = Field(default=50, ge=1, description="Learned: steps per round.")
    gradient_share: float = Field(
        default=0.4, gt=0, lt=1, description="Share of the reference documents that give gradients."
    )
    stop_share: float = Field(default=0.25, gt=0, lt=1, description="Share that decides when to stop; the rest guards.")

    @model_validator(mode="after")
    def _candidates_fill_the_budget(self) -> SaliencySection:
        if self.method != "greedy" and self.candidates < self.budget:
            raise ValueError(
                f"candidates {self.candidates} is below the budget {self.budget}: every weight that learned switches turn "
                "off is a candidate. Raise candidates, lower the budget, or use method greedy"
            )
        return self

    @model_validator(mode="after")
    def _leaves_a_guard(self) -> SaliencySection:
        if self.gradient_share + self.stop_share > 0.95:
            raise ValueError(
                f"gradient_share {self.gradient_share} and stop_share {self.stop_share} leave less than 5 % of the "
                "documents to guard the choice"
            )
        return self


class SearchSection(_Section):
    """How candidates are compared and when one is accepted."""

    metrics: tuple[Literal["saliency", "wanda", "magnitude", "random"], ...] = Field(
        default=("saliency", "wanda"), min_length=1
    )
    method: Literal["exhaustive", "halving"] = "halving"
    objective: Literal["accuracy", "loglikelihood"] = "accuracy"
    select: Literal["guarded", "argmax"] = "guarded"
    alpha: float = Field(
        default=0.05, gt=0, lt=1, description="Level of the guard over all subdomains together (Holm)."
    )
    folds: int = Field(default=2, ge=2, le=10, description="Folds of the cross-fitting.")

    @field_validator("metrics", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            return names
        for name in names:
            if name not in METRICS:
                raise unknown_name("metric", name, list(METRICS))
            if names.count(name) > 1:
                raise ValueError(f"metric {name!r} is named twice; name each once")
        return tuple(names)


class RouterSection(_Section):
    """The two-level router (MoDE Eq. 8-9)."""

    level2: Literal["linear", "centroid"] = "linear"
    precision: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="The router abstains below the confidence that gives this share of right routes.",
    )


class EvidenceSection(_Section):
    """What stands beside the expert in the report."""

    controls: int = Field(default=3, ge=0, description="Random masks of the same size per subdomain.")
    oracle: bool = Field(
        default=True, description="Also score every candidate on the reported split, labelled as such."
    )


def _task_lists(value: object) -> object:
    """Let a domain's one task stand without a list."""
    if not isinstance(value, dict):
        return value
    if not value:
        raise ValueError("no domain is given; name one as NAME=TASK")
    return {name: (tasks,) if isinstance(tasks, str) else tasks for name, tasks in value.items()}


def _named_domains(value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    for name, tasks in value.items():
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"domain name {name!r} may hold letters, digits, '-' and '_' only")
        if not tasks:
            raise ValueError(f"domain {name!r} names no task")
    return value


Domains = Annotated[dict[str, tuple[str, ...]], BeforeValidator(_task_lists), AfterValidator(_named_domains)]


class BuildRecipe(_Section):
    """Everything `freemoe build` needs to find, prove and write domain experts."""

    command: Literal["build"] = "build"
    model: str
    revision: str | None = None
    domains: Domains
    output: str = "freemoe-out"
    seed: Seed = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    threads: int | None = Field(default=None, ge=1)
    batch_tokens: int = Field(default=4096, ge=16)
    data: DataSection = DataSection()
    subdomains: SubdomainSection = SubdomainSection()
    bands: BandSection = BandSection()
    saliency: SaliencySection = SaliencySection()
    search: SearchSection = SearchSection()
    router: RouterSection = RouterSection()
    evidence: EvidenceSection = EvidenceSection()

    @model_validator(mode="after")
    def _counts_of_domains(self) -> BuildRecipe:
        counts = self.subdomains.count
        for name in counts if isinstance(counts, dict) else ():
            if name not in self.domains:
                raise ValueError(f"subdomains.count names {name!r}, which is no domain here: {', '.join(self.domains)}")
        return self


class EvalRecipe(_Section):
    """Everything `freemoe eval` needs: a model or an artefact, and tasks."""

    command: Literal["eval"] = "eval"
    artefact: str
    base: str | None = None
    experts: tuple[str, ...] = ("base", "auto")
    domains: Domains
    output: str | None = None
    seed: Seed = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    threads: int | None = Field(default=None, ge=1)
    batch_tokens: int = Field(default=4096, ge=16)
    data: DataSection = DataSection()


class GateSection(_Section):
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
    mlp_masks: Literal["shared", "tokens"] = Field(
        default="shared",
        description="One mask per expert and step, or one per token with noise of its own (the paper).",
    )
    mask_output: bool = Field(
        default=True, description="Mask the attention's output in training, as a converted model does."
    )
    mask_twice: bool = Field(
        default=False, description="Mask gate and up, so that a dropped neuron gets no gradient (authors)."
    )
    local_embedding: bool = Field(
        default=True, description="Decode each token's own embedding for V/O (ablation: off)."
    )
    train_inputs: bool = Field(default=False, description="Train the hypernetwork's input z too (authors).")
    noise: bool = Field(default=False, description="Gumbel noise in training.")
    export_noise: bool = Field(default=False, description="Draw the converted model's masks with noise too (authors).")
    temperature: float = Field(default=0.4, gt=0, description="tau of the straight-through gradients.")
    offset: float = Field(default=3.0, description="b, added to logits: masks begin at one (budget: loss).")
    keep: Literal["mean", "max"] = Field(
        default="mean", description="K: kept value dimensions over tokens (budget: loss)."
    )
    equal_widths: bool = Field(default=True, description="Raise every expert to the layer's largest width.")


class LossSection(_Section):
    """Weights of the losses (ToMoE Eq. 8-12)."""

    distillation: float = Field(default=1.0, ge=0, description="KL to the dense model.")
    size: float = Field(default=16.0, ge=0, description="R_P (budget: loss).")
    union: float = Field(default=0.0, ge=0, description="R_U: every neuron is in some expert.")
    balance: float = Field(default=0.05, ge=0, description="R_L: every expert gets its share of the tokens.")
    balance_form: Literal["soft", "hard"] = Field(default="soft", description="N sum F P, or sum F F (authors).")
    size_smoothing: float = Field(
        default=0.0, ge=0, description="Added inside the logarithms of R_P and R_U (authors: 0.001)."
    )


class TrainSection(_Section):
    """The training loop of a conversion."""

    steps: int = Field(default=400, ge=0)
    batch_tokens: int = Field(default=4096, ge=2, description="Tokens per step, about.")
    block: int | None = Field(default=None, ge=2, description="Tokens of a block. [2048, or the model's context]")
    rate: float = Field(default=3e-4, gt=0, description="Learning rate of hypernetwork, routers and decoders.")
    offset_rate: float = Field(default=3e-2, ge=0, description="Learning rate of the logits' own offsets.")
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "cosine"] = Field(
        default="cosine", description="Cosine falls to a tenth of the rates."
    )
    ramp: float = Field(
        default=0.0, ge=0, le=1, description="Share of the steps over which the budget falls to its end."
    )
    checkpointing: bool = Field(default=False, description="Make activations again in the backward pass: less memory.")
    chunk_tokens: int = Field(default=1024, ge=1, description="Tokens whose logits are held at once.")
    save_every: int = Field(default=50, ge=1, description="Steps between two saved states.")


_PROFILES: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "paper": {
        "gates": {"budget": "loss", "start": "random", "mlp_masks": "tokens", "noise": True},
        "losses": {"union": 2.0, "balance": 1.0},
        "train": {"steps": 10000, "rate": 1e-3, "weight_decay": 0.05, "batch_tokens": 2048, "schedule": "constant"},
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
        "train": {"steps": 20000, "rate": 1e-3, "weight_decay": 0.05, "batch_tokens": 2048, "schedule": "constant"},
    },
}


class ConvertRecipe(_Section):
    """Everything `freemoe convert` needs to make a dense model a token-level mixture (ToMoE)."""

    command: Literal["convert"] = "convert"
    model: str
    revision: str | None = None
    text: tuple[str, ...] = Field(default=(), description="Local text files: .txt, .jsonl, .json.")
    mix: Literal["paper", "authors"] | None = Field(default=None, description="A mix of data sets under data_root.")
    data_root: str | None = None
    output: str = "freemoe-converted"
    seed: Seed = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    threads: int | None = Field(default=None, ge=1)
    active: float = Field(default=0.5, gt=0, le=1, description="Share of the decoder's weights that a token uses.")
    experts: int = Field(
        default=8, ge=2, description="Experts of every MLP; one expert is static pruning: method static-*."
    )
    method: Literal["tomoe", "static-magnitude", "static-activation", "activation-split"] = "tomoe"
    profile: Literal["default", "paper", "authors"] = "default"
    mode: Literal["shared", "materialised", "pseudo"] = "shared"
    rivals: bool = Field(default=True, description="Also measure the rivals at the same active share.")
    gates: GateSection = GateSection()
    losses: LossSection = LossSection()
    train: TrainSection = TrainSection()

    @model_validator(mode="before")
    @classmethod
    def _profiled(cls, data: Any) -> Any:
        """Fill what is not given from the profile."""
        if not isinstance(data, dict) or data.get("profile", "default") not in _PROFILES:
            return data
        filled = dict(data)
        for section, values in _PROFILES[data.get("profile", "default")].items():
            given = data.get(section, {})
            filled[section] = {**values, **given} if isinstance(given, dict) else given
        return filled

    @model_validator(mode="after")
    def _exact_needs_statistics(self) -> ConvertRecipe:
        if self.gates.budget == "exact" and self.gates.start == "random":
            raise ValueError("gates.budget exact needs gates.start statistics: they settle the widths of the layers")
        if self.gates.budget == "exact" and self.gates.mlp_masks == "tokens":
            raise ValueError("gates.mlp_masks tokens needs gates.budget loss; an exact budget has one mask per expert")
        return self

    @model_validator(mode="after")
    def _some_text(self) -> ConvertRecipe:
        if not self.text and self.mix is None:
            raise ValueError("no text is given: --text FILE, or --mix NAME with --data-root FOLDER")
        return self


Recipe = BuildRecipe | EvalRecipe | ConvertRecipe
_COMMANDS: dict[str, type[Recipe]] = {"build": BuildRecipe, "eval": EvalRecipe, "convert": ConvertRecipe}


def recipe_from(data: object, source: str = "recipe") -> Recipe:
    """Check a mapping and return the recipe it describes.

    Raises:
        RecipeError: With every problem at once: its path, the value seen and what is allowed.
    """
    if not isinstance(data, dict):
        raise RecipeError(f"{source}: a recipe is a mapping of names to values, got {type(data).__name__}.")
    command = data.get("command", "build")
    if not isinstance(command, str) or command not in _COMMANDS:
        raise RecipeError(f"{source}: command is {command!r}; allowed: {', '.join(_COMMANDS)}.")
    kind = _COMMANDS[command]
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            path = ".".join(str(p) for p in problem["loc"]) or "(recipe)"
            seen = "" if problem["type"] == "missing" else f" (value seen: {problem['input']!r})"
            advice = _unknown_key_advice(kind, problem["loc"]) if problem["type"] == "extra_forbidden" else ""
            lines.append(f"  {path}: {problem['msg'].removeprefix('Value error, ')}{seen}{advice}")
        raise RecipeError(f"{source} cannot be used:\n" + "\n".join(lines)) from None


def _unknown_key_advice(kind: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Names that are allowed where an unknown key stood."""
    model: Any = kind
    for part in location[:-1]:
        fields = getattr(model, "model_fields", {})
        model = fields[part].annotation if part in fields else None
    names = list(getattr(model, "model_fields", {}))
    return f"; allowed here: {', '.join(names)}" if names else ""


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a YAML file."""
    file = Path(path)
    if not file.is_file():
        raise RecipeError(f"Recipe {str(path)!r} is not a file. Print one with: freemoe build ... --print-recipe")
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"Recipe {str(path)!r} cannot be read: {error.strerror or error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"Recipe {str(path)!r} is not valid YAML: {error}") from None
    return recipe_from(data, str(path))


def dump(recipe: Recipe) -> str:
    """Write a recipe as YAML that `load_recipe` reads back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
