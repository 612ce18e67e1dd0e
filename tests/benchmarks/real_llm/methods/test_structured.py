"""Methods of whole neurons on a tiny model."""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.real_llm.cells import Cell
from benchmarks.real_llm.data import Parts
from benchmarks.real_llm.methods.structured import FREE, METHODS, SETTINGS, tiny_cells
from benchmarks.real_llm.methods.weights import Stand
from benchmarks.real_llm.plan import cells, needs
from benchmarks.real_llm.protocol import Protocol
from benchmarks.rivals.rival import Schedule
from freemoe.domain_experts.structured.units import find_units
from freemoe.evals.tasks.text_tasks import TextTask
from freemoe.models.weights import find_weights
from tests.tiny import tiny_model, tiny_tokenizer

WORDS = ["the", "one", "on", "thin", "lines", "and", "other", "small", "things", "that", "we", "read"]
NEURONS = 48


def stand(cell):
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=60)) for _ in range(12)]
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    documents = TextTask("t", texts, tokenizer=tokenizer, length=32, given=4).reference()
    parts = Parts("text", documents[:6], documents[6:9], documents[9:11], documents[11:13], {}, ())
    protocol = Protocol(20, 4, 4, 4, 4, 4, Schedule(steps=4, step_tokens=64, every=2, patience=1))
    return Stand(cell, protocol, model, tokenizer, find_weights(model), parts)


def cell(method, budget=0.3, **more):
    return Cell("text", "wikitext", method, budget, **more)


def fitted(own):
    with METHODS.get(own.cell.method)(own) as found:
        return found


@pytest.mark.parametrize("method", ["structured", "structured-switches", FREE, "units-wanda", "units-taylor"])
def test_exactly_the_neurons_asked_for_are_off_and_come_back(method):
    own = stand(cell(method))
    before = {k: v.clone() for k, v in own.model.state_dict().items()}
    with METHODS.get(method)(own) as found:
        off = sum(int((w.canonical_view() == 0).sum()) for w in own.weights) / sum(w.size for w in own.weights)
        units = find_units(own.model, "neuron")
        dead = sum(int((layer.parts[-1].weight.canonical_view()[0] == 0).all(0).sum()) for layer in units.layers)
    # 30 % of 48 is 14.4: as many per layer that a multiple of 8 is left, or in all.
    wanted = round(0.3 * 2 * NEURONS) if method == FREE else 2 * 16
    assert found.facts["units"] == {"off": wanted, "of": 2 * NEURONS, "share": wanted / (2 * NEURONS)}
    assert dead == wanted
    assert off == pytest.approx(found.share_off)
    # Single switches lie inside what is left.
    assert (found.numbers > wanted) == method.endswith("switches") or found.losses[-1] >= found.losses[1]
    assert all(torch.equal(v, before[k]) for k, v in own.model.state_dict().items())
    speed = found.facts["speed"]
    if method.startswith("units-"):
        assert speed == {}
    else:
        assert speed["parameters"][1] < speed["parameters"][0]
        # The scoring format is fp32 here.
        assert speed["float32"] == {k: speed[k] for k in ("prefill", "decode", "dense")}
        assert found.losses[0] == pytest.approx(found.facts["stopping_loss_of_base"])


def test_single_switches_begin_with_the_neurons_of_the_cell_they_stand_on():
    alone, joint = stand(cell("structured")), stand(cell("structured-switches"))
    neurons = fitted(alone)
    joint.found = neurons.tensors
    # Another order of documents would find other neurons.
    joint.cell = replace(joint.cell, seed=5)
    found = fitted(joint)
    assert found.losses[0] == pytest.approx(neurons.losses[-1])
    assert found.facts["units"] == neurons.facts["units"]
    lines = {k: v for k, v in found.tensors.items() if not k.startswith("units|switch|")}
    assert lines.keys() == neurons.tensors.keys()
    assert all(torch.equal(v, neurons.tensors[k]) for k, v in lines.items())


def test_rivals_share_the_pass_of_the_first_one():
    first, alone, second = (stand(cell(f"units-{name}")) for name in ("wanda", "taylor", "taylor"))
    second.found = fitted(first).tensors
    shared, own = fitted(second), fitted(alone)
    assert not any(k.startswith("score|") for k in shared.tensors)
    assert all(torch.equal(v, own.tensors[k]) for k, v in shared.tensors.items())
    assert shared.tensors.keys() < own.tensors.keys()


@pytest.mark.parametrize(
    ("later", "below"),
    [
        (cell("structured-switches"), cell("structured")),
        (cell("units-wanda", 0.2), cell("units-wanda", 0.1)),
        (cell("units-taylor", 0.1), cell("units-wanda", 0.1)),
    ],
)
def test_a_cell_waits_for_the_one_that_it_begins_with(later, below):
    assert needs(later, {}, [later]) is None
    assert needs(later, {below.name: {}}, [later]) == [below]
    assert needs(below, {}, [below]) == []


def test_every_setting_stands_in_the_plan_and_the_tiny_ones_early():
    names = [c.name for c in cells()]
    wanted = [Cell("text", "wikitext", method, **setting) for method, of in SETTINGS.items() for setting in of]
    assert {c.name for c in wanted} <= set(names)
    assert max(names.index(c.name) for c in tiny_cells("models/stories260k")) < 12
    assert names.index("text/wikitext/structured-20%/s0") == 12
