"""What cases are made of: a tiny base, artefacts on it with experts of every kind, their results."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from freemoe.assets import demo_model_path
from freemoe.core.artifacts import read_manifest, write_manifest
from freemoe.core.errors import DataError
from freemoe.domain_experts.expert import DomainExpert, switch_expert, unit_expert
from freemoe.domain_experts.pipeline import build
from freemoe.hookmoe.pipeline import trim
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.weights import find_weights
from freemoe.recipes import recipe_from

PROBES = ("first add 12 and after that divide by 4: f(x)=", "The judge of 1984 is not heard.")
"""Texts on which answers are compared."""

_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Material:
    """A folder that `make_material` filled: ``base`` and ``mixture`` are models, ``experts`` and ``trimmed`` artefacts on them."""

    folder: Path

    @property
    def base(self):
        return self.folder / "base"

    @cached_property
    def model(self):
        return self.opened("base")[0]

    @cached_property
    def mixture(self):
        return self.opened("mixture")[0]

    @cached_property
    def tokenizer(self):
        return self.opened("base")[1]

    def opened(self, name):
        return load_base(self.folder / name, device="cpu")

    @cached_property
    def probes(self):
        """Token ids of the probes, cut to one length."""
        rows = [self.tokenizer(text)["input_ids"] for text in PROBES]
        return torch.tensor([row[: min(map(len, rows))] for row in rows])

    @cached_property
    def answers(self):
        return logits(self.model, self.probes)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def make_material(folder):
    """Write base, mixture and artefacts into an empty folder; takes seconds, and is the same every time."""
    found = Material(folder)
    _models(folder)
    _experts(found)
    _trimmed(found)
    return found


def _models(folder):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    own = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {**_SIZES, **own, "vocab_size": len(tokenizer)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense = LlamaForCausalLM(LlamaConfig(**sizes))
        mixture = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
        for model in (dense, mixture):
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=0.2)
    for model, name in ((dense, "base"), (mixture, "mixture")):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _experts(material):
    """A small build, and beside its experts one of every kind that it did not find."""
    recipe = recipe_from(
        {
            "command": "build",
            "model": str(material.base),
            "domains": {"math": "demo:math", "code": "demo:code"},
            "output": str(material.folder / "experts"),
            "device": "cpu",
            "data": {"limit": 24},
            "subdomains": {"by": "none", "min_size": 2},
            "bands": {"step": 0.5, "ratio": 0.5},
            "search": {"metrics": ["wanda"], "method": "exhaustive", "select": "argmax"},
            "evidence": {"controls": 1, "oracle": False},
        }
    )
    folder = build(recipe)
    manifest = read_manifest(folder)
    tensors = load_file(folder / "experts.safetensors")
    for expert in _more_experts(material.model):
        manifest["experts"].append(expert.manifest_entry())
        tensors |= expert.to_tensors()
    save_file(tensors, folder / "experts.safetensors")
    write_again(folder, manifest)


def _more_experts(model):
    generator = torch.Generator().manual_seed(0)
    weights = find_weights(model)
    off = {
        w.name: TensorMask.of_indices(torch.rand(w.size, generator=generator).lt(0.05).nonzero()[:, 0], w.size)
        for w in weights[:4]
    }
    up, down = (next(w.name for w in weights if kind in w.name) for kind in ("up_proj", "down_proj"))
    neurons = torch.tensor([1, 5, 8])
    lines = {up: ("rows", neurons), down: ("columns", neurons)}
    single = next(w for w in weights if "q_proj" in w.name)
    singles = Mask({single.name: TensorMask.of_indices(torch.tensor([3, 77]), single.size)})
    return [
        switch_expert("more/switch", Mask(off)),
        unit_expert("more/unit", "neuron", lines, singles),
        DomainExpert("more/base"),
    ]


def _trimmed(material):
    text = material.folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{probe} {n}"}) + "\n" for n in range(60) for probe in PROBES))
    recipe = recipe_from(
        {
            "command": "trim",
            "model": str(material.folder / "mixture"),
            "text": str(text),
            "output": str(material.folder / "trimmed"),
            "plan": {"given": "uniform:1"},
            "training": {"steps": 2, "rows": 2, "every": 1, "block": 16, "limit": 8, "held_out": 3, "test": 4},
        }
    )
    trim(recipe)


def write_again(folder, manifest):
    """Write a manifest with the checksums that its files have now."""
    try:
        write_manifest(folder, {k: v for k, v in manifest.items() if k not in ("files", "checksum")})
    except UnicodeEncodeError as error:
        raise DataError(f"No manifest can be written that holds it: {error}.") from None
