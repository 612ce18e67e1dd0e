"""What another package adds in a few lines works like what is built in."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import freemoe
from freemoe.core.errors import RecipeError
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.pipeline import build
from freemoe.domain_experts.rank.importance import METRICS, Metric
from freemoe.domain_experts.route.levels import LEVELS, Level
from freemoe.models.spec import FAMILIES, ModelFamily
from freemoe.models.weights import find_weights
from freemoe.tomoe.pipeline import convert
from freemoe.tomoe.structures.rivals import RIVALS
from freemoe.tomoe.structures.structure import LayerStructure
from tests.domain_experts.conftest import artefact, read_result, task_recipe, world  # noqa: F401
from tests.tomoe.conftest import base, recipe  # noqa: F401


# ---- from here on what another package would write (RIA: arXiv:2402.02826)
def relative(weight, norm, gradient, generator=None):
    """Weights as shares of their row and of their column, by the root of their inputs' norm."""
    size = weight.float().abs()
    shares = size / size.sum(-1, keepdim=True).clamp(min=1e-12) + size / size.sum(-2, keepdim=True).clamp(min=1e-12)
    return shares * norm.float()[:, None, :].sqrt()


def add_metric():
    METRICS.add("relative", Metric(relative, "norms"), "relative importance and activations (RIA)")


def by_order(seen):
    """The first neurons and the first dimensions of every head, whatever they do."""
    layer = seen.layer
    kept = max(1, int(seen.attention * layer.rotary.head_dim))
    bits = layer.rotary.bit_sizes.cumsum(0) <= kept
    values = torch.arange(layer.rotary.head_dim) < kept
    experts = (torch.arange(layer.intermediate_size) < seen.width).expand(2, -1).clone()
    return LayerStructure(bits, values, torch.zeros(2, layer.hidden_size), torch.zeros(2), experts)


def add_rival():
    RIVALS.add("by-order", by_order, "the first ones")


class OddConfig(LlamaConfig):
    """A model type of its own, for a model that is laid out like Llama."""

    model_type = "odd"


class Odd(LlamaForCausalLM):
    """Its model."""

    config_class = OddConfig


def add_family():
    AutoConfig.register("odd", OddConfig)
    AutoModelForCausalLM.register(OddConfig, Odd)
    linears = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)
    mlp = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
    FAMILIES.add("odd", ModelFamily("odd", ("odd",), ("model.layers",), linears, mlp), "a layout of another package")


def by_spread(x, y, classes, seed):
    """Nearest mean after shrinking the dimensions in which a class spreads, as a linear level."""
    means = np.stack([x[y == k].mean(0) for k in range(len(classes))])
    weight = means / (1e-6 + np.mean([x[y == k].var(0) for k in range(len(classes))], axis=0))
    bias = -(weight * means).sum(1) / 2
    return Level(classes, torch.from_numpy(weight).float(), torch.from_numpy(bias).float())


def add_router():
    LEVELS.add("by-spread", by_spread, "diagonal discriminant")


# ---- up to here


@pytest.fixture
def added():
    add_metric()
    add_rival()
    add_family()
    add_router()
    yield
    for registry, name in ((METRICS, "relative"), (RIVALS, "by-order"), (LEVELS, "by-spread"), (FAMILIES, "odd")):
        registry._entries.pop(name)
        if registry.allowed is not None:
            registry.allowed.remove(name)
    CONFIG_MAPPING._extra_content.pop("odd")
    AutoModelForCausalLM._model_mapping._extra_content.pop(OddConfig)


def test_a_metric_from_outside_ranks_is_written_and_read_back(world, added, tmp_path):  # noqa: F811
    section = {"metrics": ["relative"], "method": "exhaustive", "select": "argmax"}
    recipe = task_recipe(world, tmp_path / "out", search=section)
    folder = build(recipe)
    experts = {s["chosen"] for d in read_result(folder)["domains"] for s in d["subdomains"]}
    assert any("relative" in name for name in experts), experts
    moe = FreeMoE.from_pretrained(str(world.base), folder, device="cpu")
    ours = next(e for e in moe._experts.values() if e.kind == "band")
    weights = find_weights(moe.model)
    assert ours.mask(weights).count
    # Half of the way of the norms would be wanda's ranking: it is another one.
    wandas = replace(ours, band=replace(ours.band, metric="wanda"))
    assert not ours.mask(weights).is_equal(wandas.mask(weights))


def test_a_rival_from_outside_is_measured_and_written(base, added, tmp_path):  # noqa: F811
    result = json.loads((convert(recipe(base, tmp_path / "all")) / "result.json").read_text())
    assert "by-order" in result["scores"]
    folder = convert(recipe(base, tmp_path / "one", method="by-order"))
    alone = json.loads((folder / "result.json").read_text())
    assert alone["scores"]["converted"]["nll"] == result["scores"]["by-order"]["nll"]
    assert alone["scores"]["converted"]["nll"] != result["scores"]["static-magnitude"]["nll"]
    assert freemoe.load(folder, device="cpu").model.config.model_type.startswith("tomoe")


def test_a_family_and_a_router_from_outside_build_route_and_load(world, artefact, added, tmp_path):  # noqa: F811
    odd = tmp_path / "odd"
    shutil.copytree(world.base, odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "model_type": "odd", "architectures": ["Odd"]}))
    recipe = task_recipe(world, tmp_path / "out", router={"level2": "by-spread"}).model_copy(update={"model": str(odd)})
    moe = FreeMoE.from_pretrained(str(odd), build(recipe), device="cpu")
    assert isinstance(moe.model, Odd)
    plain = FreeMoE.from_pretrained(str(world.base), artefact, device="cpu")
    for name, level in moe.router.subdomain.items():
        assert level.classes == plain.router.subdomain[name].classes
        assert not torch.equal(level.weight, plain.router.subdomain[name].weight)


PLUGIN = """
from freemoe.domain_experts.rank.importance import METRICS, Metric
METRICS.add("theirs", Metric(lambda weight, norm, gradient, generator=None: weight.float().abs(), "nothing"), "size")
from benchmarks.rivals.rival import Rival, add
add(Rival("their-rival", "nothing at all", "-", "nothing", ("adaptation",), "plugin:fit", ("dense", "mixture")))
"""


@pytest.mark.parametrize("module", ["plugin", "plugin_missing"])
def test_an_entry_point_brings_its_rows_along(tmp_path, module):
    about = tmp_path / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[freemoe]\nmine = {module}\n")
    (tmp_path / "plugin.py").write_text(PLUGIN)
    code = """
from freemoe.domain_experts.recipe import BuildRecipe
recipe = BuildRecipe(model="m", domains={"a": ["b"]}, search={"metrics": ["theirs"]})
from freemoe.domain_experts.rank.importance import METRICS
from benchmarks.rivals.plan import cells
planned = [c.name for c in cells(None, None, quick=True) if c.method == "their-rival"]
print(METRICS.about("theirs"), recipe.search.metrics, planned)
"""
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if module == "plugin":
        planned = ["adaptation/freemoe-demo/demo-text/their-rival/s0"]
        assert done.stdout.strip() == f"size ('theirs',) {planned}", done.stderr
    else:
        assert "Unknown metric 'theirs'" in done.stderr
        assert "What 'mine' adds to freemoe is left out: plugin_missing cannot be imported" in done.stderr


def test_without_it_the_name_is_unknown(world, tmp_path):  # noqa: F811
    with pytest.raises(RecipeError, match=r"search.metrics: Unknown metric 'relative'"):
        task_recipe(world, tmp_path / "out", search={"metrics": ["relative"]})
    with pytest.raises(RecipeError, match=r"router.level2: Unknown router level 'liner'.*'linear'"):
        task_recipe(world, tmp_path / "out", router={"level2": "liner"})
    with pytest.raises(RecipeError, match="Unknown method 'by-order'"):
        recipe(tmp_path, tmp_path / "out", method="by-order")
