"""Threads on one base: every answer is what one thread alone gets, and the base is bit-equal afterwards."""

import asyncio
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
from transformers import LogitsProcessorList

from freemoe import FreeMoE
from freemoe.core.errors import BusyError, RecipeError, UnknownNameError
from freemoe.domain_experts.expert import switch_expert
from freemoe.models.weights import find_weights
from tests.domain_experts.test_mixture import bits, unchanged
from tests.masks import mask_of
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = ["court?", "12+7=", "treaty 9"]
NAMES = ["base", "a", "b", "c", "d", "a+c", "b&d"]
GREEDY = {"max_new_tokens": 3, "do_sample": False}


def experts_on(model, names="abcd"):
    """Random switches; every third weight is off in each, another third each time."""
    found = []
    for number, name in enumerate(names):
        generator = torch.Generator().manual_seed(number)
        off = {w.name: torch.rand(w.size, generator=generator).lt(0.3).nonzero()[:, 0] for w in find_weights(model)}
        found.append(switch_expert(name, mask_of(off, find_weights(model))))
    return found


@pytest.fixture
def model():
    return tiny_model("llama", num_hidden_layers=1, max_position_embeddings=64)


@pytest.fixture
def moe(model):
    return FreeMoE(model, experts_on(model), None, tiny_tokenizer())


def failing():
    """A processor of logits that raises at the second token."""
    calls = count()

    def process(ids, scores):
        if next(calls):
            raise ValueError("in the middle")
        return scores

    return LogitsProcessorList([process])


def slow(ids, scores):
    time.sleep(0.2)
    return scores


def text(moe, prompt, name, **options):
    return moe.generate_text(prompt, expert=name, **GREEDY, **options)[0]


def logits(moe, prompt, name):
    with torch.no_grad():
        return moe(torch.tensor([tiny_tokenizer()(prompt)["input_ids"]]), expert=name).logits


def in_a_thread(work, *given):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *given).result(timeout=60)


def test_eight_threads_get_what_one_gets(moe, model):
    before = bits(model)
    # A second host of the same base, with two of the experts under other names.
    other = FreeMoE(model, experts_on(model, "wx"), None, tiny_tokenizer())
    keys = [(moe, p, n) for n in NAMES for p in PROMPTS] + [(other, p, n) for n in ("w", "x", "base") for p in PROMPTS]
    texts, scores = ({key: give(*key) for key in keys} for give in (text, logits))
    assert len(set(texts.values())) > 6

    def work(seed):
        rng = random.Random(seed)
        for _ in range(60):
            host, prompt, name = key = rng.choice(keys)
            kind = rng.random()
            if kind < 0.08:
                with pytest.raises(ValueError, match="in the middle"):
                    text(*key, logits_processor=failing())
            elif kind < 0.12:
                with pytest.raises(UnknownNameError):
                    text(host, prompt, "nobody")
            elif kind < 0.3:
                assert text(*key) == texts[key]
            elif kind < 0.4:
                nested = rng.choice(keys)
                with host.expert(name):
                    assert torch.equal(logits(*nested), scores[nested])
                    assert torch.equal(logits(host, prompt, None), scores[key])
            elif kind < 0.43:
                assert "".join(host.stream_text(prompt, expert=name, **GREEDY)) == texts[key]
            elif kind < 0.46:
                host.set_expert(name)
            else:
                assert torch.equal(logits(*key), scores[key])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    moe.set_expert(None)
    other.set_expert(None)
    assert unchanged(model, before)


def test_or_is_refused(moe, model):
    strict = FreeMoE(model, experts_on(model), None, tiny_tokenizer(), threads="raise")
    with moe.expert("a"):
        for call in (
            lambda: text(strict, PROMPTS[0], "b"),
            lambda: logits(strict, PROMPTS[0], "b"),
            lambda: strict.set_expert("b"),
            strict.expert_summary,
            lambda: list(strict.stream_text(PROMPTS[0], expert="b")),
        ):
            with pytest.raises(BusyError, match=r"Another thread is using this model.*threads='wait'"):
                in_a_thread(call)
        # The same thread may.
        assert text(strict, PROMPTS[0], "b")
    assert in_a_thread(text, strict, PROMPTS[0], "b") == text(moe, PROMPTS[0], "b")
    with pytest.raises(RecipeError, match=r"threads is 'block'; allowed: wait .* raise"):
        FreeMoE(model, [], threads="block")


def test_blocks_that_end_out_of_order_leave_the_base(moe, model):
    before = bits(model)

    def using(name):
        with moe.expert(name):
            yield moe.active
            yield moe.active

    first, second = using("a"), using("b")
    assert [next(first), next(second)] == ["a", "b"]
    first.close()
    # The second's block is still open, and still what it was.
    assert next(second) == "b"
    assert torch.equal(logits(moe, PROMPTS[0], None), logits(moe, PROMPTS[0], "b"))
    third = using("c")
    next(third)
    # Collected on another thread.
    held = [second, third]
    del second, third
    in_a_thread(held.clear)
    assert moe.active == "base"
    assert unchanged(model, before)
    assert in_a_thread(text, moe, PROMPTS[0], "a")


def test_an_expert_that_goes_while_blocks_are_open(moe, model):
    before = bits(model)
    moe.set_expert("a&d")
    with moe.expert("a"):
        with moe.expert("a+b"):
            moe.delete_expert("a")
            assert moe.active == "base"
            assert unchanged(model, before)
        assert moe.active == "base"
    assert moe.experts == ["b", "c", "d"]
    assert unchanged(model, before)


def test_a_stream_says_the_same(moe):
    stream = moe.stream_text("court?", expert="a", max_new_tokens=12, do_sample=False)
    assert stream.expert is None
    # A reader that takes its time holds nobody up.
    assert in_a_thread(text, moe, "court?", "b")
    assert "".join(stream) == moe.generate_text("court?", expert="a", max_new_tokens=12, do_sample=False)[0]
    assert stream.expert == "a"
    assert next(stream, "over") == "over"


@pytest.mark.parametrize("end", ["close", "with", "collected"])
def test_a_stream_that_is_left_frees_the_base(moe, model, end):
    before = bits(model)
    began = time.monotonic()
    stream = moe.stream_text(
        "a", expert="a", max_new_tokens=60, logits_processor=LogitsProcessorList([slow]), do_sample=False
    )
    if end == "close":
        stream.close()
    elif end == "with":
        with stream:
            time.sleep(0.5)
    else:
        del stream
    assert text(moe, "court?", "b")
    assert time.monotonic() - began < 8
    assert unchanged(model, before)


def test_errors_of_a_stream_are_raised_where_it_is_read(moe, model):
    before = bits(model)
    stream = moe.stream_text("court?", expert="a", max_new_tokens=5, logits_processor=failing(), do_sample=False)
    with pytest.raises(ValueError, match="in the middle"):
        list(stream)
    assert list(stream) == []
    assert in_a_thread(unchanged, model, before)
    with pytest.raises(UnknownNameError):
        moe.stream_text("court?", expert="nobody")
    with moe.expert("a"), pytest.raises(BusyError, match=r"outside of `with moe\.expert"):
        moe.stream_text("court?", expert="a")


def test_a_stream_that_is_closed_before_its_turn_ends(moe):
    with moe.expert("b"):
        stream = in_a_thread(lambda: moe.stream_text("court?", expert="a", max_new_tokens=5))
        stream.close()
    assert text(moe, "court?", "b")


def test_a_block_that_is_open_across_an_await_is_refused_to_other_tasks(moe):
    async def holder(entered, leave):
        with moe.expert("a"):
            assert text(moe, "court?", "b")
            entered.set()
            await leave.wait()

    async def tasks():
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(holder(entered, leave))
        await entered.wait()
        with pytest.raises(BusyError, match=r"across an await.*asyncio\.to_thread"):
            text(moe, "court?", "b")
        leave.set()
        await task

    async def main():
        await tasks()
        several = await asyncio.gather(*(asyncio.to_thread(text, moe, "court?", n) for n in "abcd"))
        return several == [text(moe, "court?", n) for n in "abcd"]

    assert asyncio.run(main())
    # A loop that runs inside a block is part of it.
    with moe.expert("c"):
        asyncio.run(tasks())
        assert moe.active == "c"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_goes_on_where_its_own_thread_was_and_nowhere_else(moe):
    wanted = text(moe, "court?", "b")

    def in_a_child(work):
        child = os.fork()
        if not child:
            try:
                work()
                os._exit(0)
            except BaseException:
                os._exit(1)
        return os.waitpid(child, 0)[1] == 0

    def goes_on():
        assert moe.active == "a"
        assert text(moe, "court?", "b") == wanted

    def is_refused():
        with pytest.raises(BusyError, match="forked while another thread"):
            moe.set_expert("a")

    with moe.expert("a"):
        assert in_a_child(goes_on)
    held, leave = threading.Event(), threading.Event()

    def hold():
        with moe.expert("a"):
            held.set()
            leave.wait(30)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        held.wait(30)
        assert in_a_child(is_refused)
        leave.set()
    assert text(moe, "court?", "b") == wanted
