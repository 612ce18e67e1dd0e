"""What another package adds in a few lines works like what is built in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from freemoe.domain_experts.build import build
from freemoe.domain_experts.importance import METRICS, NAMES, Metric
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.errors import UnknownNameError
from tests.domain_experts.conftest import read_result, task_recipe, world  # noqa: F401


# ---- from here on what another package would write (RIA: arXiv:2402.02826)
def relative(weight, norm, gradient, generator=None):
    """Weights as shares of their row and of their column, by the root of their inputs' norm."""
    size = weight.float().abs()
    shares = size / size.sum(-1, keepdim=True).clamp(min=1e-12) + size / size.sum(-2, keepdim=True).clamp(min=1e-12)
    return shares * norm.float()[:, None, :].sqrt()


def add_it() -> None:
    METRICS.add("relative", Metric(relative, "norms"), "relative importance and activations (RIA)")


# ---- up to here


@pytest.fixture
def added() -> Iterator[None]:
    add_it()
    yield
    METRICS._entries.pop("relative")
    NAMES.remove("relative")


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


def test_without_it_the_name_is_unknown(world, tmp_path) -> None:  # noqa: F811
    with pytest.raises(UnknownNameError, match="relative"):
        task_recipe(world, tmp_path / "out", search={"metrics": ["relative"]})
