"""The rows that are built in; importing this module registers them."""

from __future__ import annotations

from benchmarks.rivals.rival import Rival, add

_HERE = "benchmarks.rivals.fits."
_BOTH = ("dense", "mixture")
_RATES = (1e-2, 5e-3, 2e-3)
_OFF = "which weights are off"

add(Rival("base", "the model as it came", "", "nothing", ("adaptation",), _HERE + "prompts:untouched", _BOTH))

# ------------------------------------------------------------------------------------- our own
for _name, _what in (
    ("learned", "switches whose positions were trained"),
    ("greedy", "the strongest few switches, ranked anew in rounds"),
):
    add(
        Rival(
            f"switches-{_name}",
            _what,
            "this package",
            _OFF,
            ("adaptation",),
            _HERE + "masks:purified",
            _BOTH,
            {"method": _name},
            sized=True,
            ours=True,
        )
    )
add(
    Rival(
        "switches-wanda",
        "trained switches, then wanda's lowest until the share is met",
        "this package",
        _OFF,
        ("compression",),
        _HERE + "masks:purified",
        _BOTH,
        {"method": "learned", "filled_by": "wanda"},
        sized=True,
        ours=True,
    )
)
add(
    Rival(
        "neurons",
        "whole neurons that training found",
        "this package",
        _OFF,
        ("compression",),
        _HERE + "units:trained",
        options={"kind": "neuron"},
        sized=True,
        ours=True,
    )
)
add(
    Rival(
        "tomoe",
        "neurons and head dimensions by token, gates trained by self-distillation",
        "Gao et al. 2025 (arXiv:2501.15316), as `freemoe convert` has it",
        "routing",
        ("compression",),
        _HERE + "split:learned",
        sized=True,
        ours=True,
    )
)
add(
    Rival(
        "experts-learned",
        "routed experts that training found",
        "this package",
        _OFF,
        ("compression",),
        _HERE + "units:trained",
        ("mixture",),
        {"kind": "expert"},
        sized=True,
        ours=True,
    )
)

# ---------------------------------------------------------------------- adaptation: equal data
add(
    Rival(
        "lora",
        "a low-rank pair beside every linear",
        "LoRA: Hu et al. 2021 (arXiv:2106.09685)",
        "extra parameters",
        ("adaptation",),
        _HERE + "tuned:low_rank",
        rank=1,
        rates=_RATES,
    )
)
add(
    Rival(
        "lora-large",
        "the same with rank 8",
        "LoRA: Hu et al. 2021 (arXiv:2106.09685)",
        "extra parameters",
        ("adaptation",),
        _HERE + "tuned:low_rank",
        rank=8,
        rates=_RATES,
    )
)
add(
    Rival(
        "dora",
        "LoRA with the length of every output's weights as numbers of its own",
        "DoRA: Liu et al. 2024 (arXiv:2402.09353)",
        "extra parameters",
        ("adaptation",),
        _HERE + "tuned:low_rank",
        options={"lengths": True},
        rank=1,
        rates=_RATES,
    )
)
add(
    Rival(
        "full",
        "every linear of the decoder's layers tuned",
        "",
        "weights",
        ("adaptation",),
        _HERE + "tuned:full",
        rates=(1e-3, 3e-4, 1e-4),
    )
)
add(
    Rival(
        "fewshot",
        "reference documents in front of every prompt, as many as the stopping documents like best",
        "Brown et al. 2020 (arXiv:2005.14165)",
        "prompt",
        ("adaptation",),
        _HERE + "prompts:fewshot",
        _BOTH,
    )
)
add(
    Rival(
        "laser",
        "one matrix cut to a low rank: layer, kind and rank chosen by the stopping documents",
        "LASER: Sharma et al. 2023 (arXiv:2312.13558)",
        "weights",
        ("adaptation",),
        _HERE + "low_rank:laser",
    )
)

# ------------------------------------------------------------------ compression: equal share off
add(
    Rival(
        "svd",
        "LASER's cut in every matrix, to the rank that leaves the share",
        "the operator of LASER: Sharma et al. 2023 (arXiv:2312.13558)",
        "weights",
        ("compression",),
        _HERE + "low_rank:everywhere",
        sized=True,
    )
)
for _name, _what, _paper in (
    ("wanda", "per row the smallest |w| times the norm of its input", "Wanda: Sun et al. 2023 (arXiv:2306.11695)"),
    ("magnitude", "per row the smallest |w|", "Han et al. 2015 (arXiv:1506.02626)"),
):
    add(
        Rival(
            _name, _what, _paper, _OFF, ("compression",), _HERE + "masks:ranked", _BOTH, {"metric": _name}, sized=True
        )
    )
add(
    Rival(
        "wanda-lora",
        "wanda's cut, then LoRA beside what is left: as many steps as our trained cuts have",
        "Sun et al. 2023 (arXiv:2306.11695), who tune after the cut as well",
        "extra parameters",
        ("compression",),
        _HERE + "tuned:after_a_cut",
        options={"metric": "wanda"},
        sized=True,
        rank=1,
        rates=_RATES,
    )
)
add(
    Rival(
        "random",
        "as many single weights, drawn at random: the control",
        "",
        _OFF,
        ("adaptation", "compression"),
        _HERE + "masks:ranked",
        _BOTH,
        {"metric": "random"},
        sized=True,
    )
)
add(
    Rival(
        "sparsegpt",
        "single weights off, the others moved to make up for them, layer by layer",
        "SparseGPT: Frantar & Alistarh 2023 (arXiv:2301.00774)",
        "weights",
        ("compression",),
        _HERE + "sparsegpt:pruned",
        _BOTH,
        sized=True,
    )
)
for _name, _what, _paper in (
    ("taylor", "whole neurons lowest by |sum of w dL/dw|", "LLM-Pruner: Ma et al. 2023 (arXiv:2305.11627)"),
    ("random", "whole neurons drawn at random: the control", ""),
):
    add(
        Rival(
            f"neurons-{_name}",
            _what,
            _paper,
            _OFF,
            ("compression",),
            _HERE + "units:ranked",
            options={"kind": "neuron", "by": _name},
            sized=True,
        )
    )
add(
    Rival(
        "cmoe",
        "neurons shared by all tokens, the others by cluster of tokens, by their activations",
        "in the manner of CMoE: Pei et al. 2025 (arXiv:2502.04416)",
        "routing",
        ("compression",),
        _HERE + "split:by_activation",
        sized=True,
    )
)
for _name, _what, _paper in (
    ("naee", "the experts whose absence changes the layer's output least", "NAEE: Lu et al. 2024 (arXiv:2402.14800)"),
    ("reap", "the experts of the least mean gate times output norm", "REAP: Lasby et al. 2025 (arXiv:2510.13999)"),
    ("random", "experts drawn at random: the control", ""),
):
    add(
        Rival(
            f"experts-{_name}" if _name == "random" else _name,
            _what,
            _paper,
            _OFF,
            ("compression",),
            _HERE + "units:ranked",
            ("mixture",),
            {"kind": "expert", "by": _name},
            sized=True,
        )
    )
