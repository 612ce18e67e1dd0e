"""Experts per request in vLLM give what Hugging Face gives with their weights off, whatever else is in the batch."""

from typing import Any

import pytest
import torch

from tests.vllm.world import FEW, MANY, NONE, UNITS, differences, max_difference, prompts, token_logprobs, write_world

CLOSE = 1e-4
NEW = 6
BOTH = f"{FEW}+{MANY}"
# Prompts of 9, 40, 120, 65, 33 and 90 tokens in steps of 64: some are read while others already write.
MIXED = [None, FEW, MANY, UNITS, BOTH, FEW]


def batch(experts, ids, **more):
    named = [{} if expert is None else {"expert": expert} for expert in experts]
    return {"batch": [{"ids": i, "new": NEW, **e, **more} for i, e in zip(ids, named, strict=True)]}


STEPS: dict[str, dict[str, Any]] = {
    "mixed": batch(MIXED, prompts()),
    "reversed": batch(MIXED[::-1], prompts()[::-1]),
    "scored": batch(MIXED, prompts(), score=True),
    # The same 90 tokens for everyone, twice: the second time from the cache.
    "first": batch([*MIXED[:5], NONE], [prompts()[5]] * 6),
    "again": batch([*MIXED[:5], NONE], [prompts()[5]] * 6),
    # The client's salt is the same for all.
    "client's salt": batch([*MIXED[:5], NONE], [prompts()[5]] * 6, salt="mine"),
    "client's salt again": batch([*MIXED[:5], NONE], [prompts()[5]] * 6, salt="mine"),
    # What the salt is for: one expert after the other without it.
    "off": {"do": "no salt"},
    "base, no salt": batch([None], [prompts()[5]]),
    "expert, no salt": batch([MANY], [prompts()[5]]),
    "on": {"do": "salt"},
    "unknown": {"do": "fail", **batch(["law/missing"], prompts(1))},
    "unknown part": {"do": "fail", **batch([f"{FEW}+law/missing"], prompts(1))},
    "no name": {"do": "fail", "batch": [{"ids": prompts(1)[0], "new": NEW, "expert": 2}]},
    "alive": batch(MIXED, prompts()),
    # Past the check of what a process offers; the engine itself knows better.
    "offered": {"do": "offer", "name": "law/missing"},
    "slipped in": {"do": "fail", **batch(["law/missing"], prompts(1))},
}
V2_STEPS = ["mixed", "reversed", "first", "again"]


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def moe(world):
    from freemoe import FreeMoE

    return FreeMoE.from_pretrained(world)


@pytest.fixture(scope="session")
def v1(world, ask):
    return dict(zip(STEPS, *ask("v1", list(STEPS.values()), world), strict=True))


@pytest.fixture(scope="session")
def v2(world, ask):
    return dict(zip(V2_STEPS, *ask("v2", [STEPS[name] for name in V2_STEPS], world), strict=True))


def reference(moe, expert, ids):
    """(tokens,) log-probability of every token but the first, from Hugging Face with the expert's weights off."""
    with moe.expert(expert or "base"):
        return token_logprobs(moe.model, ids)


def distance(moe, step, answers):
    """Largest difference of log-probabilities, over a batch."""
    return max_difference([step], [answers], lambda ids, expert: reference(moe, expert, ids))


SERVED = ["mixed", "scored", "reversed", "first", "again", "client's salt", "client's salt again", "alive"]


@pytest.mark.parametrize("name", SERVED)
def test_first_runner_answers_as_hugging_face(name, v1, moe):
    differences.append(distance(moe, STEPS[name], v1[name]))
    assert differences[-1] <= CLOSE


@pytest.mark.parametrize("name", V2_STEPS)
def test_second_runner_answers_as_hugging_face(name, v2, moe):
    differences.append(distance(moe, STEPS[name], v2[name]))
    assert differences[-1] <= CLOSE


def test_experts_differ_by_far_more_than_that(moe):
    ids = prompts()[5]
    apart = [reference(moe, a, ids) - reference(moe, None, ids) for a in (FEW, MANY, UNITS, BOTH)]
    assert min(float(a.abs().max()) for a in apart) > 100 * CLOSE
    assert torch.equal(reference(moe, NONE, ids), reference(moe, None, ids))


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_order_in_the_batch_does_not_matter(runner, request):
    said = request.getfixturevalue(runner)
    assert [a["tokens"] for a in said["mixed"]] == [a["tokens"] for a in said["reversed"][::-1]]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_an_expert_goes_on_from_its_own_prefix_alone(runner, request):
    said = request.getfixturevalue(runner)
    # Two whole blocks of 32 are in the cache of "mixed" for the base's 90 tokens under FEW, and for nobody else.
    first = {a.get("expert"): b["cached"] for a, b in zip(STEPS["first"]["batch"], said["first"], strict=True)}
    assert first == {None: 0, FEW: 64, MANY: 0, UNITS: 0, BOTH: 0, NONE: 0}
    assert [a["cached"] for a in said["again"]] == [64] * 6


def test_a_clients_salt_keeps_it_apart_from_others_and_from_experts(v1):
    assert [a["cached"] for a in v1["client's salt"]] == [0] * 6
    assert [a["cached"] for a in v1["client's salt again"]] == [64] * 6


def test_without_our_salt_an_expert_reads_anothers_cache(v1, moe):
    assert distance(moe, STEPS["base, no salt"], v1["base, no salt"]) <= CLOSE
    assert v1["expert, no salt"][0]["cached"] == 64
    assert distance(moe, STEPS["expert, no salt"], v1["expert, no salt"]) > 10 * CLOSE


@pytest.mark.parametrize("name", ["unknown", "unknown part", "no name", "slipped in"])
def test_an_unknown_expert_is_refused_and_the_known_are_named(name, v1):
    assert v1[name] is not None
    assert "name of an expert" in v1[name] if name == "no name" else "law/missing" in v1[name]
    if name in ("unknown", "slipped in"):
        assert FEW in v1[name]
