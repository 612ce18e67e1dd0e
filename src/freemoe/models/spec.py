"""Model families as data: where the decoder layers, their linears, fused experts and gates are.

Supporting a new family is one row here and one line in ``tests/tiny.py``. Paths that a layer does not have
are skipped, because the layers of one model may differ (dense and sparse layers, full and low-rank queries).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freemoe.core.errors import FamilyError
from freemoe.core.registry import Registry

if TYPE_CHECKING:
    from torch import nn

Group = tuple[str, ...]
"""Module paths, relative to a decoder layer, that multiply one and the same input."""


@dataclass(frozen=True)
class ExpertsLayout:
    """Routed experts that transformers 5 keeps in one module as three-dimensional parameters."""

    path: str = "mlp.experts"  # The module, relative to the layer
    # The parameter that multiplies the layer's hidden state (gate and up stacked or interleaved)
    up: str = "gate_up_proj"
    down: str = "down_proj"  # The parameter that multiplies the intermediate activation
    layout: str = "experts"  # ``"experts"`` for (experts, out, in), ``"experts_columns"`` for (experts, in, out)
    up_bias: str | None = None  # The parameter (experts, out) added after ``up``, where there is one


@dataclass(frozen=True)
class GateLayout:
    """The router of a mixture layer."""

    path: str = "mlp.gate"  # The module, relative to the layer; its forward returns (logits, weights, index)
    # The attribute of this module that is read on every forward; no other copy of k acts on a loaded model
    top_k: str = "top_k"
    # Where k is kept in the configuration; set it too, or saving brings the old k back
    config_key: str = "num_experts_per_tok"
    # Whether the k weights sum to one: ``"always"``, ``"never"``, or the configuration key that says so
    renormalised: str = "always"
    # The attribute whose values are added to the sigmoids of the logits when experts are chosen, and not to their
    # weights; None where the heaviest are chosen
    correction: str | None = None


@dataclass(frozen=True)
class ModelFamily:
    """One row: how the models of a family are laid out."""

    name: str  # The name in ``FAMILIES``
    model_types: tuple[str, ...]  # Values of ``config.model_type`` that belong to it
    layers: tuple[str, ...]  # Paths of the list of decoder layers; the first that exists is taken
    attention: tuple[Group, ...]  # Groups of linears of the attention sublayer, in the order of computation
    mlp: tuple[Group, ...]  # Groups of linears of the feed-forward sublayer, shared experts included
    experts: ExpertsLayout | None = None  # Fused routed experts, or None
    gate: GateLayout | None = None  # Their router, or None
    # How rotary dimensions are paired: ``"half"`` (i with i + d/2), ``"interleaved"`` (2i with 2i + 1) or ``"none"``
    rotary: str = "half"
    # How the attention's first linears hold the heads: ``"separate"`` (queries, keys and values in linears of their
    # own), ``"stacked"`` (one linear: all queries, all keys, all values), ``"by_head"`` (one linear: query, key and
    # value of the first head, then of the next) or ``"latent"`` (heads share low-rank keys and values)
    heads: str = "separate"


_LAYERS = ("model.layers",)
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_QKVO = (_QKV, ("self_attn.o_proj",))
_GATED = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))

FAMILIES: Registry[ModelFamily] = Registry("model family")


def _add_family(
    name: str,
    about: str,
    model_types: tuple[str, ...] = (),
    layers: tuple[str, ...] = _LAYERS,
    attention: tuple[Group, ...] = _QKVO,
    mlp: tuple[Group, ...] = _GATED,
    **more: Any,
) -> None:
    """Add a row; what most families share is left out."""
    FAMILIES.add(name, ModelFamily(name, model_types or (name,), layers, attention, mlp, **more), about)


_add_family("llama", "Llama 1-3 and models of the same layout")
_add_family("mistral", "Mistral")
_add_family("qwen2", "Qwen2 and Qwen2.5, dense")
_add_family("qwen3", "Qwen3, dense")
_add_family("gemma", "Gemma")
_add_family("gemma2", "Gemma 2")
_add_family(
    "gemma3",
    "Gemma 3: the text model, also inside the model with images",
    ("gemma3_text", "gemma3"),
    ("model.layers", "model.language_model.layers"),
)
_add_family(
    "phi",
    "Phi-1.5 and Phi-2: attention and feed-forward side by side",
    attention=(_QKV, ("self_attn.dense",)),
    mlp=(("mlp.fc1",), ("mlp.fc2",)),
)
_add_family(
    "phi3",
    "Phi-3 and Phi-4: fused q/k/v and gate/up",
    attention=(("self_attn.qkv_proj",), ("self_attn.o_proj",)),
    mlp=(("mlp.gate_up_proj",), ("mlp.down_proj",)),
    heads="stacked",
)
_add_family(
    "gpt2",
    "GPT-2: Conv1D, whose weights are transposed",
    layers=("transformer.h",),
    attention=(("attn.c_attn",), ("attn.c_proj",)),
    mlp=(("mlp.c_fc",), ("mlp.c_proj",)),
    rotary="none",
    heads="stacked",
)
_add_family(
    "opt",
    "OPT",
    layers=("model.decoder.layers",),
    attention=(_QKV, ("self_attn.out_proj",)),
    mlp=(("fc1",), ("fc2",)),
    rotary="none",
)
_add_family(
    "gpt_neox",
    "GPT-NeoX and Pythia",
    layers=("gpt_neox.layers",),
    attention=(("attention.query_key_value",), ("attention.dense",)),
    mlp=(("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",)),
    heads="by_head",
)
_add_family("mixtral", "Mixtral", mlp=(), experts=ExpertsLayout(), gate=GateLayout())

_SOFTMAX = GateLayout(renormalised="norm_topk_prob")
_add_family(
    "qwen2_moe",
    "Qwen1.5/2 MoE: routed experts, one shared expert, some dense layers",
    mlp=(*_GATED, ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), ("mlp.shared_expert.down_proj",)),
    experts=ExpertsLayout(),
    gate=_SOFTMAX,
)
_add_family("qwen3_moe", "Qwen3 MoE", experts=ExpertsLayout(), gate=_SOFTMAX)
_add_family("olmoe", "OLMoE", mlp=(), experts=ExpertsLayout(), gate=_SOFTMAX)

_LATENT: dict[str, Any] = {
    "attention": (
        ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("self_attn.q_b_proj",),
        ("self_attn.kv_b_proj",),
        ("self_attn.o_proj",),
    ),
    "mlp": (*_GATED, ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), ("mlp.shared_experts.down_proj",)),
    "experts": ExpertsLayout(),
    "rotary": "interleaved",
    "heads": "latent",
}
_add_family(
    "deepseek_v2",
    "DeepSeek-V2: low-rank keys and values (and queries), shared experts, first layers dense",
    gate=GateLayout(renormalised="never"),
    **_LATENT,
)
_add_family(
    "deepseek_v3",
    "DeepSeek-V3 and R1: as V2, with a router of sigmoids and a bias",
    gate=GateLayout(renormalised="norm_topk_prob", correction="e_score_correction_bias"),
    **_LATENT,
)
_add_family(
    "gpt_oss",
    "GPT-OSS: experts transposed, gate and up interleaved, with biases",
    mlp=(),
    experts=ExpertsLayout(layout="experts_columns", up_bias="gate_up_proj_bias"),
    gate=GateLayout(path="mlp.router"),
)


def family_of(model: nn.Module) -> ModelFamily:
    """Return the row of a model, by ``config.model_type``.

    Raises:
        FamilyError: No row has this type; the message says what was looked for, what was seen and what to do.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    for name in FAMILIES:
        family = FAMILIES.get(name)
        if model_type in family.model_types:
            return family
    looked = sorted({path for name in FAMILIES for path in FAMILIES.get(name).layers})
    raise FamilyError(
        f"No model family is known for {type(model).__name__} (config.model_type {model_type!r}). "
        f"Known families: {', '.join(FAMILIES)}. Decoder layers are looked for at {', '.join(looked)}; "
        f"{modules_seen(model)}. If its layers look like one of these, add a row to "
        "src/freemoe/models/spec.py."
    )


def find_layers(model: nn.Module, family: ModelFamily) -> tuple[str, list[nn.Module]]:
    """Return the path of a model's decoder layers, and the layers.

    A model without a head (``AutoModel``) is understood too: its paths lack the first part.

    Raises:
        FamilyError: None of the family's paths leads to a list of layers.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    tried = [*family.layers, *(p.removeprefix(prefix) for p in family.layers if p.startswith(prefix))]
    for path in tried:
        found: Any = find_module(model, path)
        if found is not None and len(layers := list(found)) > 0:
            return path, layers
    raise FamilyError(
        f"{type(model).__name__} belongs to family {family.name!r}, but no decoder layers stand at "
        f"{', '.join(tried)}; {modules_seen(model)}. Add the path to its row in src/freemoe/models/spec.py."
    )


def find_module(module: nn.Module, path: str) -> nn.Module | None:
    """What stands at a path inside a module; None where that is no module."""
    from torch import nn

    found: object = module
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None


def modules_seen(model: nn.Module) -> str:
    """Say which modules a model has, the ones near the top first (for error messages)."""
    names = sorted((n for n, _ in model.named_modules() if n), key=lambda n: (n.count("."), n))
    near, others = names[:8], names[8:]
    more = f" and {len(others)} more" if others else ""
    return f"modules seen: {', '.join(near) or 'none'}{more}"
