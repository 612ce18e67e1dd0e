"""Requests before and after a change, in turns: what is slower is said to be, with an interval, and each is timed once in a run."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch

from freemoe.core.errors import RecipeError
from freemoe.core.run.folder import RunFolder
from freemoe.evals import speed
from freemoe.evals.speed import compare_prompts, compare_speed, prompt_lengths, speed_lines
from freemoe.evals.verdict import interval_sign
from freemoe.recipes import TimingSection
from freemoe.results.common import SpeedResult
from tests.tiny import tiny_model

PROMPT = torch.arange(3, 19)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


class Clock:
    """Time that passes while a model computes and at no other time: what else the machine does is not in it."""

    def __init__(self):
        self.now, self.passes = 0.0, 0

    @contextmanager
    def running(self, model, more=0.0, prompt_only=False):
        """The model, each pass of which takes about 10 ms; and some seconds more, or only that of the prompt does."""

        def wait(module, args, given):
            self.passes += 1
            self.now += 0.01 + 0.0001 * (self.passes % 7)
            if not prompt_only or given["input_ids"].shape[1] > 1:
                self.now += more

        handle = model.register_forward_pre_hook(wait, with_kwargs=True)
        try:
            yield model
        finally:
            handle.remove()


@pytest.mark.parametrize("prompt_only", [True, False])
def test_what_is_slower_is_reliably_slower_and_by_how_much(model, prompt_only, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(speed, "time_request", partial(speed.time_request, clock=lambda: clock.now))
    sides = {"base": lambda: clock.running(model), "ours": lambda: clock.running(model, 0.03, prompt_only)}
    found = compare_speed(sides, PROMPT[None], new=3, rounds=4)
    assert interval_sign(found["prefill"]) == -1
    assert prompt_only or interval_sign(found["decode"]) == -1
    assert found["ours"]["ttft"] - found["base"]["ttft"] == pytest.approx(0.03, abs=0.001)
    more = found["ours"]["itl"] - found["base"]["itl"]
    assert more == pytest.approx(0.0 if prompt_only else 0.03, abs=0.001)
    assert found["prefill"]["low"] < found["prefill"]["mean"] < found["prefill"]["high"]
    assert (found["prompt"], found["new_tokens"], found["rounds"]) == (16, 3, 4)


def test_each_prompt_is_timed_once_in_a_run_and_one_round_has_no_interval(model, tmp_path):
    asked, opened, found = TimingSection(prompts=(8, 40), new_tokens=2, rounds=1), [], []
    sides = dict.fromkeys(("base", "ours"), lambda: opened.append(1) or nullcontext(model))
    for _ in range(2):
        run = RunFolder(tmp_path / "out", {"a": 1})
        found.append(compare_prompts(asked, sides, PROMPT, prompt_lengths(asked, model, 16), run))
        run.discard_if_idle()
    assert found[0] == found[1]
    assert len(opened) == 2 * 2 * 2
    told = found[0]["speed"]
    assert [one["prompt"] for one in told["lengths"]] == [8, 40]
    assert (told["decode"]["low"], told["decode"]["high"]) == (None, None)
    SpeedResult.model_validate(told)
    assert "prompt of 40 tokens" in speed_lines(told)[1]


@pytest.mark.parametrize(
    ("fields", "lengths"),
    [({}, [64]), ({"prompts": (8, 16)}, [8, 16]), ({"new_tokens": 250}, [6]), ({"rounds": 0, "prompts": (900,)}, [])],
)
def test_a_block_is_timed_unless_prompts_are_named_or_nothing_is(model, fields, lengths):
    assert prompt_lengths(TimingSection(**fields), model, 64) == lengths
    assert compare_prompts(TimingSection(rounds=0), {}, PROMPT, [], None) == {}  # type: ignore[arg-type]
    assert speed_lines(None) == []


def test_a_prompt_beyond_the_context_is_refused(model):
    said = "250 tokens and 17 new ones, and the model has 256 positions: prompts of 239"
    with pytest.raises(RecipeError, match=said):
        prompt_lengths(TimingSection(prompts=(8, 250)), model, 64)
