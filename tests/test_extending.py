"""What another package adds in a few lines works like what is built in."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

import freemoe
from freemoe.domain_experts.build import build
from freemoe.domain_experts.importance import METRICS, Metric
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.errors import RecipeError, UnknownNameError
from freemoe.tomoe.convert import convert
from freemoe.tomoe.rivals import RIVALS
from freemoe.tomoe.structure import LayerStructure
from tests.domain_experts.conftest import read_result, task_recipe, world  # noqa: F401
from tests.tomoe.test_convert import base, recipe  # noqa: F401


# ---- from here on what another package would write (RIA: arXiv:2402.02826)
def relative(weight, norm, gradient, generator=None):
    """Weights as shares of their row and of their column, by the root of their inputs' norm."""
    size = weight.float().abs()
    shares = size / size.sum(-1, keepdim=True).clamp(min=1e-12) + size / size.sum(-2, keepdim=True).clamp(min=1e-12)
    return shares * norm.float()[:, None, :].sqrt()


def add_metric() -> None:
    METRICS.add("relative", Metric(relative, "norms"), "relative importance and activations (RIA)")


def by_order(seen):
    """The first neurons and the first dimensions of every head, whatever they do."""
    layer = seen.layer
    kept = max(1, int(seen.attention * layer.rotary.head_dim))
    bits = layer.rotary.sizes.cumsum(0) <= kept
    values = torch.arange(layer.rotary.head_dim) < kept
    experts = (torch.arange(layer.width) < seen.width).expand(2, -1).clone()
    return LayerStructure(bits, values, torch.zeros(2, layer.hidden), torch.zeros(2), experts)


def add_rival() -> None:
    RIVALS.add("by-order", by_order, "the first ones")


# ---- up to here


@pytest.fixture
def added() -> Iterator[None]:
    add_metric()
    add_rival()
    yield
    for registry, name in ((METRICS, "relative"), (RIVALS, "by-order")):
        registry._entries.pop(name)
        registry.allowed.remove(name)  # type: ignore[union-attr]


def test_a_metric_from_outside_ranks_is_written_and_read_back(world, added: None, tmp_path) -> None:  # noqa: F811
    section = {"metrics": ["relative"], "method": "exhaustive", "select": "argmax"}
    recipe = task_recipe(world, tmp_path / "out", search=section)
    folder = build(recipe)
    experts = {s["chosen"] for d in read_result(folder)["domains"] for s in d["subdomains"]}
    assert any("relative" in name for name in experts), experts
    moe = FreeMoE.from_pretrained(str(world.base), folder, device="cpu")
    off = {name: moe.expert_positions(name) for name in moe.experts}
    assert any(len(p) for where in off.values() for p in where.values())
    # Half of the way of the norms would be wanda's ranking: it is another one.
    other = build(task_recipe(world, tmp_path / "wanda", search={**section, "metrics": ["wanda"]}))
    theirs = FreeMoE.from_pretrained(str(world.base), other, device="cpu")
    same = [
        torch.equal(p, theirs.expert_positions(name).get(weight, torch.empty(0)))
        for name in moe.experts
        for weight, p in off[name].items()
    ]
    assert not all(same)


def test_a_rival_from_outside_is_measured_and_written(base, added: None, tmp_path) -> None:  # noqa: F811
    result = json.loads((convert(recipe(base, tmp_path / "all")) / "result.json").read_text())
    assert "by-order" in result["scores"]
    folder = convert(recipe(base, tmp_path / "one", method="by-order"))
    alone = json.loads((folder / "result.json").read_text())
    assert alone["scores"]["converted"]["nll"] == result["scores"]["by-order"]["nll"]
    assert alone["scores"]["converted"]["nll"] != result["scores"]["static-magnitude"]["nll"]
    assert freemoe.load(folder, device="cpu").model.config.model_type.startswith("tomoe")


def test_without_it_the_name_is_unknown(world, tmp_path) -> None:  # noqa: F811
    with pytest.raises(UnknownNameError, match="relative"):
        task_recipe(world, tmp_path / "out", search={"metrics": ["relative"]})
    with pytest.raises(RecipeError, match="Unknown method 'by-order'"):
        recipe(tmp_path, tmp_path / "out", method="by-order")
