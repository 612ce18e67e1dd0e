"""The arithmetic of peaks: how it grows with what, and what it says of models that are not there."""

import pytest

from benchmarks.speed.artefact import PUBLISHED, stand_in
from freemoe.domain_experts.cost.memory import STAGES, fitting_devices, stage_peaks
from freemoe.models.weights import find_weights
from tests.tiny import tiny_model

GIB = 2**30


def said(model, tokens=1024, width=0.1, budget=0.01, **more):
    peaks = stage_peaks(model, find_weights(model), tokens, width=width, budget=budget, **more)
    return {name: peak.expected for name, peak in peaks.items()}


def test_every_stage_is_named_in_order():
    assert tuple(said(tiny_model("llama"))) == STAGES


def test_what_is_off_costs_its_bits_and_its_values():
    model = stand_in(*PUBLISHED["Llama-2-7B"])
    size = sum(w.size for w in find_weights(model))
    narrow, wide = said(model, width=0.1), said(model, width=0.3)
    # Two bytes for every value that is put aside; both masks are one bit per weight.
    assert wide["band search"] - narrow["band search"] == pytest.approx(0.2 * 2 * size)
    assert narrow["report"] - narrow["band search"] == pytest.approx(size / 8)
    # Below a sixteenth, a mask is 16 bits for every weight that is off.
    few = said(model, width=0.01)
    assert few["report"] - few["band search"] == pytest.approx(0.01 * 2 * size)
    assert said(model, budget=0.02)["learned"] > narrow["learned"]
    assert said(model, cut=1e-3)["greedy"] > narrow["greedy"]


def test_passes_grow_with_their_tokens_until_they_are_cut():
    model = stand_in(*PUBLISHED["Llama-2-7B"])
    few, many, most = (said(model, tokens) for tokens in (256, 1024, 65536))
    for stage in STAGES:
        assert few[stage] <= many[stage] <= most[stage], stage
    assert many["learned"] > few["learned"]
    # A pass keeps no more than the base's own bytes: larger batches go in parts.
    assert said(model, 2 * 65536)["learned"] == most["learned"]


def test_seven_billion_weights_fit_a_device_of_80_and_seventy_do_not():
    small, large = (stand_in(*PUBLISHED[name]) for name in ("Llama-2-7B", "Llama-2-70B"))
    base = 2 * sum(p.numel() for p in small.parameters())
    assert base + max(said(small).values()) < 60 * GIB
    # Bands of a tenth and their report, above a base of 12.6 GiB.
    assert said(small)["report"] < 4.5 * GIB
    for stage in ("band search", "learned", "report"):
        ratio = said(large)[stage] / said(small)[stage]
        assert 4 < ratio < 12, stage


def test_routed_experts_are_met_by_the_tokens_that_are_sent_to_them():
    model = stand_in(*PUBLISHED["Mixtral-8x7B"])
    gates = [w.gate for w in find_weights(model) if w.gate is not None]
    assert {gate.experts_per_token for gate in gates} == {model.config.num_experts_per_tok} == {2}
    assert said(model)["scoring"] < 2 * GIB


@pytest.mark.parametrize(
    ("gib", "words"),
    [(1, "1 device of 8 GiB"), (20, "1 device of 24 GiB"), (72, "1 device of 80 GiB"), (100, "2 devices of 80 GiB")],
)
def test_what_fits_where(gib, words):
    assert fitting_devices(gib * GIB) == words
