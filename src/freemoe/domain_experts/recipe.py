"""The recipe of domain experts: `freemoe build`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from freemoe.core.registry import check_name
from freemoe.recipes import limits
from freemoe.recipes.data import DataSection, DomainRecipe, Domains
from freemoe.recipes.sections import (
    BatchTokens,
    Devices,
    Dtype,
    Model,
    Output,
    Preset,
    RecipeSection,
    Revision,
    Seed,
    Threads,
    UnitSeconds,
    Where,
    Workers,
)

METRICS = ["saliency", "wanda", "magnitude", "random"]
"""Names that ``search.metrics`` may hold; a metric that is registered elsewhere adds its own."""

PURIFICATIONS = ["auto", "greedy", "learned", "both"]
"""Names that ``saliency.method`` may hold; the same."""

SEARCHES = ["exhaustive", "halving"]
"""Names that ``search.method`` may hold; the same."""

ROUTERS = ["linear", "unregularised", "centroid"]
"""Names that ``router.level2`` may hold; the same."""


def _one_of(kind: str, names: list[str]) -> AfterValidator:
    return AfterValidator(lambda name: check_name(kind, name, names))


class SubdomainSection(RecipeSection):
    """How a domain is divided (MoDE Eq. 3-4)."""

    by: Literal["kmeans", "task", "field", "none"] = Field(default="kmeans", description="How a domain is divided.")
    count: int | dict[str, int] | None = Field(
        default=None,
        description="Clusters per domain: a number, or one per domain. If absent: 1 per 40 documents, at most 8; 1 for text.",
    )
    min_size: int = Field(
        default=8, ge=2, le=limits.DOCUMENTS, description="Smaller clusters are merged into the nearest."
    )
    initialisations: int = Field(default=10, ge=1, le=1000, description="Starts of k-means; the best is kept.")
    feature: Literal["embedding", "hidden"] = Field(
        default="embedding",
        description="Of a prompt: mean of its tokens' embeddings (MoDE), or of the states in mid-network.",
    )

    @field_validator("count")
    @classmethod
    def _check_count(cls, value: int | dict[str, int] | None) -> int | dict[str, int] | None:
        numbers = list(value.values()) if isinstance(value, dict) else [value] if value is not None else []
        if any(not 1 <= n <= limits.SUBDOMAINS for n in numbers):
            raise ValueError(f"a domain has at least 1 subdomain, and at most {limits.SUBDOMAINS:,}")
        return value


class BandSection(RecipeSection):
    """The grid of bands (MoDE Eq. 6, Algorithm 1): shares of the ascending importance ranking, 0 = least important."""

    start: float = Field(default=0.0, ge=0, lt=1, description="theta_init: where the grid of bands begins.")
    end: float = Field(default=1.0, gt=0, le=1, description="theta_max: where it ends.")
    step: float = Field(default=0.1, ge=1e-6, le=1, description="delta_theta: from band to band.")
    ratio: float = Field(
        default=0.1, ge=1e-6, le=1, description="Width of a band: the papers' pruning ratio (MoDE Table 3)."
    )
    p: Literal["1", "2", "4", "inf"] = Field(default="2", description="Norm of the inputs (MoDE Table 2).")
    scope: Literal["row", "layer"] = Field(
        default="row", description="row (MoDE), or layer (Free-MoE): one ranking per matrix."
    )
    sublayers: Literal["attention", "mlp", "both"] = Field(
        default="both", description="Linears that are touched (MoDE Table 4)."
    )
    layers: tuple[Annotated[int, Field(le=limits.LAYERS)], Annotated[int, Field(le=limits.LAYERS)]] | None = Field(
        default=None, description="Decoder layers [first, last) that are touched."
    )
    inclusive: bool = Field(
        default=False, description="Also the band that begins at the end (MoDE Algorithm 1: theta <= theta_max)."
    )
    patch: Literal[1, 2, 4, 16] = Field(default=1, description="Side of the square patches (MoDE Table 5).")

    @field_validator("p", mode="before")
    @classmethod
    def _name_of_p(cls, value: object) -> object:
        return str(value) if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _check_range(self) -> BandSection:
        if self.layers is not None and not 0 <= self.layers[0] < self.layers[1]:
            raise ValueError(f"layers is {list(self.layers)}; it is [first, last) with 0 <= first < last")
        if self.end <= self.start:
            raise ValueError(f"bands end at {self.end}, which is not above their start {self.start}")
        if self.start + self.ratio > 1 + 1e-9:
            raise ValueError(f"the first band [{self.start}, {self.start + self.ratio}) reaches above 1")
        if (count := (self.end - self.start) / self.step) > limits.BANDS:
            raise ValueError(
                f"a step of {self.step:g} from {self.start:g} to {self.end:g} makes {count:,.0f} bands; at most {limits.BANDS:,} are "
                "searched: take a larger step"
            )
        return self

    def band_edges(self) -> list[tuple[float, float]]:
        """Every band [a, b) of the grid that begins below ``end`` (or at it) and ends at or below 1, without rounding drift."""
        last = self.end + (1e-9 if self.inclusive else -1e-9)
        bands: list[tuple[float, float]] = []
        i = 0
        while True:
            a = round(self.start + i * self.step, 6)
            b = round(a + self.ratio, 6)
            if b > 1 + 1e-9 or a >= last:
                return bands
            bands.append((a, min(b, 1.0)))
            i += 1


class SaliencySection(RecipeSection):
    """Signed purification: weights ranked by w * dL/dw, switched off greedily or with learned switches."""

    method: Annotated[str, _one_of("way of signed purification", PURIFICATIONS)] = Field(
        default="auto",
        description="Signed purification: greedy, learned, both; auto: learned, but greedy for questions to a base of fewer than 17M weights.",
    )
    budget: float = Field(
        default=0.01, gt=0, le=1, description="Signed purification: largest share of the weights that may be off."
    )
    patience: int = Field(
        default=8,
        ge=1,
        le=limits.STEPS,
        description="Signed purification: rounds without a better stopping loss before the end.",
    )
    checkpointing: Literal["auto"] | bool = Field(
        default="auto",
        description="Make activations again in the backward pass: less memory, about a third slower. auto: when they would "
        "take more than half of what is free.",
    )
    compute: Literal["auto", "own", "bfloat16"] = Field(
        default="auto",
        description="Number format of gradient passes of an fp32 base; auto: bfloat16 where that is measured to be faster.",
    )
    step: float = Field(
        default=5e-5,
        gt=0,
        lt=1,
        description="Greedy purification of tasks: share of the weights switched off per round.",
    )
    text_step: float = Field(
        default=3e-4, gt=0, lt=1, description="Greedy: the same for plain text, whose loss sits at every token."
    )
    part_tokens: int = Field(
        default=12288,
        ge=1,
        le=limits.TOKENS,
        description="Greedy: answer tokens per part; every part of a round ranks anew and switches off its share.",
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        le=limits.STEPS,
        description="Learned: steps of training; if absent, five passes over the documents, 24 to 600 steps.",
    )
    step_tokens: int = Field(
        default=2048, ge=1, le=limits.TOKENS, description="Learned: answer tokens per step at most."
    )
    every: int | None = Field(
        default=None, ge=1, le=limits.STEPS, description="Learned: steps per round; if absent, a twelfth of the steps."
    )
    gradient_share: float = Field(
        default=0.4, gt=0, lt=1, description="Share of the reference documents that give gradients."
    )
    stop_share: float = Field(default=0.25, gt=0, lt=1, description="Share that decides when to stop; the rest guards.")

    @model_validator(mode="after")
    def _leaves_a_guard(self) -> SaliencySection:
        if self.gradient_share + self.stop_share > 0.95:
            raise ValueError(
                f"gradient_share {self.gradient_share} and stop_share {self.stop_share} leave less than 5 % of the "
                "documents to guard the choice"
            )
        return self


class UnitSection(RecipeSection):
    """Structured purification: whole units are off, and can be cut out of the model (`docs/structured.md`)."""

    unit: Literal["neuron", "kv_group", "layer", "expert"] | None = Field(
        default=None, description="Switch whole units off, not single weights only."
    )
    off: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], ...], Field(min_length=1, max_length=100)] = Field(
        default=(0.2,), description="Shares of the units off: one, or several for the curve, 0.1,0.2,0.3."
    )
    layout: Literal["even", "free"] = Field(
        default="even", description="even: as many in every layer, so that a plain checkpoint can say it; free."
    )
    multiple: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="even: neurons left per layer are a multiple of it; 8 on a CPU, 64 elsewhere.",
    )
    steps: int = Field(default=200, ge=1, le=limits.STEPS, description="Steps of training per share.")
    step_tokens: int = Field(default=2048, ge=1, le=limits.TOKENS, description="Answer tokens per step, about.")
    every: int = Field(default=20, ge=1, le=limits.STEPS, description="Steps between two looks at the stopping loss.")
    patience: int = Field(default=4, ge=1, le=limits.STEPS, description="Looks without a better loss that end a share.")
    margin: float | None = Field(default=None, gt=0, le=100, description="Loss that is none. [1 point, 0.01 nats]")

    @field_validator("off", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(","))
        return (value,) if isinstance(value, float | int) else value

    @field_validator("off")
    @classmethod
    def _check_ascending(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError(f"shares {list(value)} must ascend, each once: 0.1,0.2,0.3")
        return value


class SearchSection(RecipeSection):
    """How candidates are compared and when one is accepted."""

    metrics: tuple[str, ...] = Field(
        max_length=100,
        default=("saliency", "wanda"),
        description="saliency, wanda, magnitude, random: rankings that compete, comma-separated; with units none unless said "
        "(saliency then switches off single weights of what is left).",
    )
    method: Annotated[str, _one_of("search", SEARCHES)] = Field(
        default="halving",
        description="exhaustive: every band on every document (the papers); halving: the better half on twice as many.",
    )
    objective: Literal["accuracy", "loglikelihood"] = Field(default="accuracy", description="What the search compares.")
    select: Literal["guarded", "argmax"] = Field(
        default="guarded",
        description="guarded: what a test accepts, else the base; argmax: the best candidate, also where it is worse than the base "
        "(the papers' Algorithm 1).",
    )
    alpha: float = Field(default=0.05, gt=0, lt=1, description="Family-wise significance level (Holm).")

    @model_validator(mode="before")
    @classmethod
    def _without_folds(cls, data: object) -> object:
        # Recipes from when winners were tested by folds still load.
        return {k: v for k, v in data.items() if k != "folds"} if isinstance(data, dict) else data

    @field_validator("metrics", mode="before")
    @classmethod
    def _known_metrics(cls, value: object) -> object:
        names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            return names
        for name in names:
            check_name("metric", name, METRICS)
            if names.count(name) > 1:
                raise ValueError(f"metric {name!r} is named twice; name each once")
        return tuple(names)


class RouterSection(RecipeSection):
    """The two-level router (MoDE Eq. 8-9)."""

    level2: Annotated[str, _one_of("router level", ROUTERS)] = Field(
        default="linear",
        description="Router's second level: linear; unregularised, as the first level then is too (MoDE Eq. 9); or the nearest "
        "centroid (MoDE Eq. 4).",
    )
    precision: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=0.9,
        description="The router abstains below the confidence that gives this share of right routes; null: never (the papers).",
    )


class EvidenceSection(RecipeSection):
    """What stands beside the expert in the report."""

    controls: int = Field(
        default=3, ge=0, le=1000, description="Random masks as large as each expert; one has no interval."
    )
    oracle: bool = Field(
        default=True, description="Also score every candidate on the reported split, labelled as such."
    )


_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # One expert per domain by learned switches alone: no bands, so no calibration and no search among them.
    "quick": {
        "data": {"limit": 80},
        "subdomains": {"count": 1},
        "saliency": {"steps": 24, "every": 8},
        "units": {"steps": 24, "every": 8},
        "search": {"metrics": ("saliency",)},
        "evidence": {"controls": 1, "oracle": False},
    },
    "thorough": {
        "subdomains": {"initialisations": 50},
        "saliency": {"method": "both"},
        "units": {"steps": 600},
        "search": {"method": "exhaustive"},
        "evidence": {"controls": 10},
    },
}


_PROFILES: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "paper": {
        "subdomains": {"min_size": 2},
        "bands": {"end": 0.5, "step": 0.05, "ratio": 0.05, "inclusive": True},
        "search": {"metrics": ("wanda",), "method": "exhaustive", "select": "argmax"},
        "router": {"level2": "unregularised", "precision": None},
    },
}


class BuildRecipe(DomainRecipe):
    """Everything `freemoe build` needs to find, prove and write domain experts."""

    SETTINGS: ClassVar[dict[str, Any]] = {"preset": _PRESETS, "profile": _PROFILES}
    SHORT: ClassVar[dict[str, str]] = {
        "metric": "search.metrics",
        "search": "search.method",
        "purify": "saliency.method",
        "step": "saliency.step",
        "patience": "saliency.patience",
        "data_root": "data.root",
        "subdomains": "subdomains.count",
    }

    command: Literal["build"] = "build"
    model: Model
    revision: Revision = None
    domains: Domains
    output: Output = "freemoe-out"
    preset: Preset = "standard"
    profile: Literal["default", "paper"] = Field(
        default="default",
        description="Settings of bands, search and router that are not given themselves; paper: MoDE's Algorithm 1.",
    )
    seed: Seed = 0
    dtype: Dtype = "auto"
    device: Devices = "auto"
    threads: Threads = None
    place: Where = "local"
    workers: Workers = 1
    unit_seconds: UnitSeconds = None
    batch_tokens: BatchTokens = 4096
    data: DataSection = DataSection()
    subdomains: SubdomainSection = SubdomainSection()
    bands: BandSection = BandSection()
    saliency: SaliencySection = SaliencySection()
    units: UnitSection = UnitSection()
    search: SearchSection = SearchSection()
    router: RouterSection = RouterSection()
    evidence: EvidenceSection = EvidenceSection()

    @model_validator(mode="before")
    @classmethod
    def _units_alone_unless_said(cls, data: object) -> object:
        """Units compete alone where no metric is named; written down, so that a dumped recipe means the same."""
        if not isinstance(data, dict):
            return data
        units, search = data.get("units") or {}, data.get("search") or {}
        if isinstance(units, dict) and units.get("unit") and isinstance(search, dict) and "metrics" not in search:
            return {**data, "search": {**search, "metrics": ()}}
        return data

    @model_validator(mode="after")
    def _something_competes(self) -> BuildRecipe:
        if not self.search.metrics and self.units.unit is None:
            raise ValueError("search.metrics names no metric; name at least 1 of " + ", ".join(METRICS))
        return self

    @model_validator(mode="after")
    def _counts_of_domains(self) -> BuildRecipe:
        counts = self.subdomains.count
        for name in counts if isinstance(counts, dict) else ():
            if name not in self.domains:
                raise ValueError(f"subdomains.count names {name!r}, which is no domain here: {', '.join(self.domains)}")
        return self
