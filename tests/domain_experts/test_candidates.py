"""The candidates of a build: parts that never meet, gains that could never be proven, who purifies, broken numbers."""

import math
from dataclasses import replace

import pytest
import torch

from freemoe.core.errors import DataError, NumericError
from freemoe.core.run.folder import RunFolder
from freemoe.domain_experts.candidates import make_subdomains, purify_all
from freemoe.domain_experts.context import prepare_context
from freemoe.domain_experts.prove.power import check_division
from freemoe.domain_experts.purify import methods as purification
from freemoe.domain_experts.purify.greedy import PurifyResult, PurifyTask
from freemoe.domain_experts.recipe import SaliencySection
from freemoe.domain_experts.route.subdomains import divide_domain
from freemoe.evals.statistics import detectable_gain
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.weights import find_weights
from tests.domain_experts.conftest import Told, choice_rows, task_recipe, text_recipe, write_jsonl
from tests.domain_experts.test_mixture import bits, unchanged
from tests.masks import indices_of, mask_of
from tests.tiny import tiny_model


def made(world, folder, counts, **changes):
    """Subdomains of one domain per number of reference documents, without the expensive steps."""
    files = [write_jsonl(folder / f"d{i}.jsonl", choice_rows(2 * n, seed=i)) for i, n in enumerate(counts)]
    domains = {file.stem: [str(file)] for file in files}
    changes = {"search": {"metrics": ["saliency"], "select": "guarded"}, **changes}
    recipe = task_recipe(world, folder / "out", domains=domains, **changes)
    told = Told()
    context = prepare_context(recipe, told)
    told.lines.clear()
    assert [len(data.reference) for data in context.domains.values()] == counts
    check_division(context, divided(context))
    return context, told, make_subdomains(context, divided(context), None)


def divided(context):
    return {
        name: divide_domain(name, data.reference, torch.zeros(len(data.reference), 32), context.recipe.subdomains, 0)
        for name, data in context.domains.items()
    }


def put_method(monkeypatch, name, search):
    """Let another function stand for a way of purifying."""
    methods = purification.METHODS
    monkeypatch.setitem(methods._entries, name, replace(methods.get(name), search=search))


def test_parts_are_disjoint_and_whole(world, tmp_path):
    _, told, (sub,) = made(world, tmp_path, [40])
    gradient, stop, guard = sub.parts
    assert sorted(gradient + stop + guard) == list(range(40))
    assert (len(gradient), len(stop), len(guard)) == (16, 10, 14)
    assert sub.guard_indices == guard
    assert not [line for line in told.lines if line.startswith("warning")]


def power_line(domain, metric, documents, tests, *levels, more=""):
    """What is said of a gain that is tested at one level, or at one between two."""
    now, twice = (
        " to ".join(f"{100 * detectable_gain(n, level):.0f}" for level in levels) for n in (documents, 2 * documents)
    )
    return (
        f"power: {domain}, {metric}: a true gain of {now} points is accepted with a chance of 80 % ({documents} "
        f"documents test it, {tests} tests share alpha 0.05{more}); with twice the documents {twice} points"
    )


def test_the_gain_that_can_be_proven_is_said_beforehand(world, tmp_path):
    _, told, _ = made(world, tmp_path, [60, 40])
    assert told.lines == [power_line(f"d{i}", "saliency", n, 2, 0.025) for i, n in enumerate((21, 14))]
    # Bands pay for each of the four where the search is halving, and where all are scored for those that are unlike the others.
    search = {"metrics": ["random"], "select": "guarded", "method": "halving"}
    _, told, _ = made(world, tmp_path / "halving", [40], search=search)
    assert told.lines == [power_line("d0", "random", 40, 1, 0.05 / 4)]
    _, told, _ = made(world, tmp_path / "all", [40], search={**search, "method": "exhaustive"})
    more = "; the more alike the 4 candidates, the less"
    assert told.lines == [power_line("d0", "random", 40, 1, 0.05, 0.05 / 4, more=more)]


def test_a_subdomain_that_can_prove_nothing_is_named(world, tmp_path):
    _, told, subs = made(world, tmp_path, [60, 8])
    assert len(subs) == 2
    power, line = told.lines
    assert power.startswith("power: d0, saliency: ")
    assert line.startswith("warning: d1/all, saliency: 3 different documents test it")
    assert "at alpha 0.05 among 2 tests; 18 reference documents would do" in line
    # The number it names would do, and one less would not: 35 % of the documents guard.
    _, told, _ = made(world, tmp_path / "more", [60, 18])
    assert [line.split(",")[0] for line in told.lines] == ["power: d0", "power: d1"]


def test_a_build_that_can_prove_nothing_is_refused(world, tmp_path):
    with pytest.raises(DataError, match="No subdomain has enough reference documents") as caught:
        made(world, tmp_path, [8, 9])
    assert "d0/all, saliency: 3 different" in str(caught.value)
    assert "--select argmax" in str(caught.value)
    # Without a guard nothing need be proven; with a looser one it can be.
    made(world, tmp_path / "argmax", [8, 9], search={"metrics": ["saliency"], "select": "argmax"})
    made(world, tmp_path / "loose", [8, 9], search={"metrics": ["saliency"], "alpha": 0.5})
    # A metric whose candidates are tested on all documents still can.
    _, told, _ = made(world, tmp_path / "more", [8, 9], search={"metrics": ["saliency", "random"]})
    assert [": ".join(line.split(": ")[:2]) for line in told.lines] == [
        "power: d1, random",
        "warning: d0/all, saliency",
        "warning: d1/all, saliency",
        # Eight documents and four bands are one document short: it could pass only after another test did.
        "warning: d0/all, random",
    ]


def test_questions_are_purified_greedily_where_the_base_is_small():
    small, large = (find_weights(tiny_model("llama", hidden_size=h, intermediate_size=4096)) for h in (128, 768))
    section = SaliencySection()
    assert purification.method_of(section, False, small) is purification.METHODS.get("greedy")
    assert purification.method_of(section, False, large) is purification.METHODS.get("learned")
    assert purification.method_of(section, True, small) is purification.METHODS.get("learned")
    asked = SaliencySection(method="greedy")
    assert purification.method_of(asked, True, large) is purification.METHODS.get("greedy")


@pytest.mark.parametrize(("greedy", "learned", "kept"), [(0.5, 0.7, 1), (0.7, 0.5, 2), (0.5, 0.5, 1), (1.0, 1.0, 0)])
def test_of_both_ways_the_lower_stopping_loss_is_kept(monkeypatch, greedy, learned, kept):
    def one_off(place):
        return Mask({"w": TensorMask.of_indices(torch.tensor([place]), 9)})

    def stub(position, loss):
        def run(task, section):
            for number, value in ((1, loss), (2, 0.9)):
                task.on_round(number, value, 0.0)
            # The best round is not the last one; a round may be worse than the base.
            best = int(loss < 1)
            return PurifyResult(one_off(position) if best else Mask(), (1.0, loss, 0.9 + loss), best)

        return run

    put_method(monkeypatch, "greedy", stub(1, greedy))
    put_method(monkeypatch, "learned", stub(2, learned))
    told = []
    model = tiny_model("llama")
    task = PurifyTask(model, [], [], [], False, 0, lambda number, loss, off: told.append((number, loss)))
    section = SaliencySection(method="both", budget=0.01, step=0.001)
    found = purification.METHODS.get("both").run(task, section)
    assert {name: at.tolist() for name, at in indices_of(found.mask).items()} == ({"w": [kept]} if kept else {})
    # Rounds go on counting, and there is room for all of them.
    assert told == [(1, greedy), (2, 0.9), (11, learned), (12, 0.9)]
    assert purification.METHODS.get("both").rounds(section, False) >= 12


@pytest.mark.parametrize("method", ["auto", "greedy", "learned", "both"])
@pytest.mark.parametrize("make", [task_recipe, text_recipe], ids=["tasks", "text"])
def test_the_recipe_says_who_purifies(world, tmp_path, monkeypatch, method, make):
    calls = []

    def stub(name):
        def run(task, section):
            calls.append((name, section))
            task.on_round(1, 1.0, 0.0)
            return PurifyResult(mask_of({task.weights[0].name: torch.tensor([1, 4])}, task.weights), (2.0, 1.0), 1)

        return run

    put_method(monkeypatch, "greedy", stub("greedy"))
    put_method(monkeypatch, "learned", stub("learned"))
    recipe = make(
        world,
        tmp_path / "out",
        saliency={"method": method, "patience": 3, "budget": 0.02, "checkpointing": True, "steps": 70, "every": 20},
        seed=1,
        search={"metrics": ["saliency"], "select": "argmax"},
        subdomains={"by": "none"},
    )
    told = Told()
    context = prepare_context(recipe, told)
    subs = purify_all(context, RunFolder(tmp_path / "out", {}), make_subdomains(context, divided(context), None))
    asked = ("learned" if make is text_recipe else "greedy") if method == "auto" else method
    expected = ["greedy", "learned"] if asked == "both" else [asked]
    assert [name for name, _ in calls] == expected * len(subs)
    assert all(given == recipe.saliency for _, given in calls)
    for sub in subs:
        assert sub.stopping_losses == (2.0, 1.0)
        assert indices_of(sub.candidate_mask("saliency"))[context.weights[0].name].tolist() == [1, 4]
    # The bar ends full, though every subdomain took one round only.
    most = {"learned": 4, "greedy": int(0.02 / (3e-4 if make is text_recipe else 5e-5))}
    rounds = sum(most[name] for name in expected)
    assert told.stages["signed purification"] == [len(subs) * rounds] * 2


def test_broken_numbers_name_the_subdomain_and_keep_what_is_done(world, tmp_path):
    context, _, (first, second) = made(world, tmp_path, [40, 44])
    before = bits(context.model)
    run = RunFolder(tmp_path / "out", {})
    real = context.make_batches
    spoilt = {id(second.split.documents[i]) for i in second.parts[0]}

    def batches(documents, labels=None):
        found = real(documents, labels)
        if id(documents[0]) in spoilt:
            context.model.model.norm.weight.data.fill_(math.nan)
        return found

    context.make_batches = batches
    with pytest.raises(NumericError, match=r"Subdomain 'd1/all': .*loss.*\n?.*subdomains done before are kept"):
        purify_all(context, run, [first, second])
    assert f"purify|{first.name}" in run.journal
    assert f"purify|{second.name}" not in run.journal
    context.model.model.norm.weight.data.copy_(before["model.norm.weight"].view(torch.float32))
    assert unchanged(context.model, before)
