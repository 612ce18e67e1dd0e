"""A tiny model on a device with documents, and what a build does with them."""

import pytest
import torch

from freemoe.domain_experts.expert import band_expert, switch_expert
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.purify.batches import answer_batches, gold_rows
from freemoe.domain_experts.purify.greedy import PurifyTask, greedy_purify
from freemoe.domain_experts.purify.learned import learn_switches
from freemoe.domain_experts.rank.bands import Band, BandRankings
from freemoe.domain_experts.rank.calibrate import calibrate
from freemoe.domain_experts.rank.random_mask import random_mask
from freemoe.domain_experts.recipe import SaliencySection
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document
from freemoe.evals.tasks.task import TaskGrader
from freemoe.models.switchboard import ExpertCache
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.masks import mask_of
from tests.tiny import CASES, tiny_model, tiny_tokenizer


def each_family(*quick, of=tuple(CASES)):
    """A test's ``case`` is every tiny model; all but the quick ones are for ``make hardening``."""
    cases = [pytest.param(case, marks=() if case in quick else pytest.mark.hardening) for case in of]
    return pytest.mark.parametrize("case", cases)


TEXTS = [
    "a law says that courts decide",
    "sums of two numbers are numbers",
    "birds fly over the hills in spring",
    "one",
]


class World:
    """A model on a device, its weights, and documents."""

    def __init__(self, case, device):
        self.model = tiny_model(case).to(device)
        if case.endswith("moe"):
            # The other ways call what accelerators alone can do.
            self.model.set_experts_implementation("eager")
        self.weights = find_weights(self.model)
        self.scorer = Scorer(self.model, tiny_tokenizer(), batch_tokens=64)
        self.documents = [
            Document("q", str(i), str(i), "choice", text, (" yes", " no way"), i % 2, index=i)
            for i, text in enumerate(TEXTS)
        ]

    def batches(self):
        return answer_batches(gold_rows(self.scorer, self.documents), [0, 1, 0, 1], 64, self.model.device)


def score(world):
    return [
        s.value
        for s in Evaluator(
            world.scorer, {"q": TaskGrader("q", "first", lambda document, answers: {"first": answers[0][0]})}
        ).score(world.documents)
    ]


def bands(world):
    norms = calibrate(world.model, world.weights, ((b.ids, b.mask, b.labels) for b in world.batches()), 2)
    found = []
    for band in (Band("wanda", 0.2, 0.4), Band("wanda", 0.2, 0.4, scope="layer"), Band("magnitude", 0.1, 0.3, patch=2)):
        rankings = BandRankings(world.weights, lambda tap: norms.input_norm(tap, 0, 2), [band])
        with switched_off(world.weights, rankings.mask_of_band(band)):
            found.append(score(world))
    return found


def board(world):
    norms = calibrate(world.model, world.weights, ((b.ids, b.mask, b.labels) for b in world.batches()), 2)
    band = Band("wanda", 0.2, 0.4)
    mask = BandRankings(world.weights, lambda tap: norms.input_norm(tap, 0, 2), [band]).mask_of_band(band)
    switchboard, found = ExpertCache(world.weights), []
    for name in ("band", "random"):
        switchboard.add_expert(name, random_mask(mask, 0) if name == "random" else mask)
        switchboard.activate_expert(name)
        found.append(score(world))
    switchboard.activate_expert(None)
    return found, score(world)


def greedy(world):
    batches = world.batches()
    task = PurifyTask(world.model, world.weights, batches[:1], batches[1:])
    return greedy_purify(task, SaliencySection(step=0.01, budget=0.03)).losses


def learned(world):
    batches = world.batches()
    task = PurifyTask(world.model, world.weights, batches[:1], batches[1:])
    return learn_switches(task, SaliencySection(budget=0.03, steps=6, step_tokens=4, every=3)).losses


def numbers(value):
    """All that a work found, one after the other."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from numbers(part)
    else:
        yield float(value)


WORKS = [score, bands, board, greedy, learned]


def mixture(case, device, dtype=torch.float32):
    """A model with an expert of switches and one of a band, made on the device."""
    model = tiny_model(case).to(device, dtype)
    weights = find_weights(model)
    # Of a mixture's experts no rows can be given to single sequences.
    dense = [w for w in weights if not w.is_fused]
    few = mask_of({w.name: torch.arange(0, w.size, 40, device=device) for w in dense}, weights)
    low = Band("magnitude", 0.0, 0.3)
    experts = [switch_expert("few", few), band_expert("low", low, BandRankings(dense, None).band_ends(low), {}, dense)]
    return FreeMoE(model, experts, None, tiny_tokenizer())
