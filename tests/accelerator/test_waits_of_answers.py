"""How often the host waits for a device while a base with experts answers: no more for more layers, experts and sequences."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from freemoe.domain_experts.expert import band_expert, switch_expert, unit_expert
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.rank.bands import Band, BandRankings
from freemoe.domain_experts.structured.masks import units_off
from freemoe.domain_experts.structured.units import find_units
from freemoe.evals.engine.sampling import SamplingConfig
from freemoe.evals.engine.scorer import Scorer
from freemoe.kernels.sparse import bands
from freemoe.models.mask import Mask
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from freemoe.serve.engine import acting
from freemoe.serve.engine.outbox import EventQueue
from freemoe.serve.engine.requests import SequenceRequest
from freemoe.serve.engine.runner import SlotRunner, runner_for
from freemoe.serve.engine.scheduler import BatchScheduler
from freemoe.serve.engine.sequence import SequenceState
from freemoe.serve.metrics import ServerMetrics
from freemoe.serve.settings import EngineLimits
from freemoe.tomoe.structures.masked import apply_structure
from tests.masks import mask_of
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tomoe.random_structures import random_structure

NAMES = ["e0", "e1", "e2", "e3"]
THINLY, MUCH, UNITS, BANDS = "a few places", "every fifth place", "whole rows and columns", "bands"
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def expert_of(kind, number, model):
    weights, name = find_weights(model), NAMES[number]
    if kind == UNITS:
        units = find_units(model, "neuron")
        off = {layer.number: torch.tensor([number, number + 5]) for layer in units.layers}
        return unit_expert(name, "neuron", units.line_indices(off), Mask())
    if kind == BANDS:
        norms = {
            w.tap: torch.rand(1, w.num_columns, generator=torch.Generator().manual_seed(number)) + 0.1 for w in weights
        }
        band = Band("wanda", 0.0, 0.2 + number / 20)
        return band_expert(name, band, BandRankings(weights, norms.__getitem__).band_ends(band), norms, weights)
    every = number + (30 if kind == THINLY else 5)
    return switch_expert(name, mask_of({w.name: torch.arange(number, w.size, every) for w in weights}, weights))


def mixture(kind, device, layers=2):
    """A base on a device with four experts, which were made on the CPU."""
    model = tiny_model("llama", num_hidden_layers=layers, hidden_size=16, intermediate_size=24)
    experts = [expert_of(kind, number, model) for number in range(len(NAMES))]
    return FreeMoE(model.to(device), experts, None, tiny_tokenizer())


@pytest.fixture
def ids(accelerator):
    return torch.randint(3, 200, (4, 5), generator=torch.Generator().manual_seed(0)).to(accelerator)


@pytest.fixture
def per_token(pretend_accelerator):
    """How often each further token waits, of a call that is told how many there are."""

    def count(call):
        call(2)
        call(2)  # what is made once, such as masks
        found = []
        for tokens in (3, 7):
            with pretend_accelerator.waits() as waits:
                call(tokens)
            found.append(waits.total)
        return (found[1] - found[0]) / 4

    return count


@pytest.fixture
def no_more_than_the_base(pretend_accelerator):
    """Fails where a model waits more often for some tokens than it does by itself: once, to see whether texts are packed."""

    def check(model, ids, inside):
        with pretend_accelerator.waits() as alone:
            model(ids, use_cache=False)
        with inside(), pretend_accelerator.waits() as waits:
            model(ids, use_cache=False)
        assert waits.total == alone.total <= 1, waits

    return check


def test_generate_with_one_expert(per_token, ids, accelerator):
    moe = mixture(THINLY, accelerator)
    with moe.expert("e0"):
        assert per_token(lambda n: moe.generate(input_ids=ids[:1], max_new_tokens=n, **GREEDY)) <= 1


@pytest.mark.parametrize("kind", [THINLY, MUCH, UNITS, BANDS])
def test_a_mixed_batch_has_all_its_places_there(
    kind, accelerator, ids, no_more_than_the_base, pretend_accelerator, monkeypatch
):
    if kind == BANDS:
        # What is around the kernel, and the way of more rows than it is the best for.
        monkeypatch.setattr(bands, "tiles_available", lambda weight: True)
        monkeypatch.setattr(bands, "tiled_products", bands.reference_tiled_products)
    moe = mixture(kind, accelerator)
    for strategy in ("fused", "scratch"):
        with moe.mixed(strategy) as run:

            @contextmanager
            def assigned(names, run=run):
                run.assign(names)
                moe.model(ids, use_cache=False)
                yield
                run.assign([])

            no_more_than_the_base(moe.model, ids, lambda: assigned(NAMES))
            # Sequences come and go: which are whose is sent once for all layers, and a band kernel's list of tokens too.
            with pretend_accelerator.waits() as waits:
                run.assign(NAMES[::-1])
                moe.model(ids, use_cache=False)
            assert waits.total <= 1 + (3 if kind == BANDS else 1), waits


def test_generate_with_four_experts(per_token, ids, accelerator):
    moe = mixture(THINLY, accelerator)

    def generate(tokens):
        return moe.generate(input_ids=ids, expert=NAMES, strategy="fused", max_new_tokens=tokens, **GREEDY)

    assert per_token(generate) <= 1


ALL_WISHES: dict[str, Any] = {
    "top_k": 20, "min_p": 0.01, "presence": 0.1, "frequency": 0.1, "repetition": 1.1,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("wishes", "own"), [({}, 2), (ALL_WISHES, 8)], ids=["greedy", "all wishes"])
@pytest.mark.parametrize(("experts", "passes"), [(1, 1), (4, 4), ("mixed", 1)])
def test_a_step_of_the_server(experts, passes, wishes, own, accelerator, pretend_accelerator, monkeypatch):
    """One wait for each pass, whose rows are sent together, and some for the step, however many sequences and layers there are."""
    monkeypatch.setattr(acting, "worth_mixing", lambda weights, rows: experts == "mixed")
    for layers, sequences in ((1, 4), (2, 8)):
        moe, limits = mixture(THINLY, accelerator, layers), EngineLimits(128, batch=8)
        runner = runner_for(moe, limits)
        assert isinstance(runner, SlotRunner)
        scheduler = BatchScheduler(runner, limits, ServerMetrics())
        for n in range(sequences):
            name = NAMES[0 if experts == 1 else n % len(NAMES)]
            # No two ask for the same.
            own_wishes = (
                {"sampling": SamplingConfig(temperature=0.5 + n / 10, top_p=0.9), "logprobs": n} if wishes else {}
            )
            ask = SequenceRequest(tuple(range(5, 10 + n)), name, 40, **{**wishes, **own_wishes})
            scheduler.waiting.append(SequenceState(ask, EventQueue(1000), moe.tokenizer, ()))
        scheduler.admit_waiting()
        for _ in range(3):
            scheduler.step()
        with pretend_accelerator.waits() as waits:
            for _ in range(4):
                scheduler.step()
        assert len(scheduler.running) == sequences
        assert waits.total == 4 * (passes + own), waits


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(2, 0.8, 0.9)], ids=["greedy", "sampled"])
def test_generations_of_the_scorer(sampling, per_token, accelerator):
    scorer = Scorer(tiny_model("llama").to(accelerator), tiny_tokenizer())
    # One is the text's, which may have ended, the other in transformers, which looks whether anything is masked.
    assert per_token(lambda n: scorer.samples(["one two", "three"], ["\n"], n, sampling)) <= 2


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True], ids=["gate", "static"])
def test_a_structure_on_the_dense_model(static, ids, accelerator, no_more_than_the_base):
    model = tiny_model("llama")
    structure = random_structure(model, static=static)
    no_more_than_the_base(model.to(accelerator), ids, lambda: apply_structure(model, structure))


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "neuron"), ("llama", "kv_group"), ("llama", "layer"), ("mixtral", "expert")]
)
def test_units_that_are_off(family, kind, ids, accelerator, no_more_than_the_base):
    model = tiny_model(family)
    if family == "mixtral":
        model.set_experts_implementation("batched_mm")
    units = find_units(model.to(accelerator), kind)
    off = {layer.number: torch.tensor([0]) for layer in units.layers[:1]}
    no_more_than_the_base(model, ids, lambda: units_off(units, off))
    no_more_than_the_base(model, ids, lambda: switched_off(find_weights(model), units.mask(off)))
