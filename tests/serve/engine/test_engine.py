"""Whatever runs beside it, a sequence is what it is alone; and it ends when it should, alone."""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from freemoe import FreeMoE
from freemoe.core.errors import DataError, NumericError, UnknownNameError
from freemoe.evals.engine.sampling import SamplingConfig
from freemoe.serve.engine.choosing import TokenSampler, gather_logprobs, sample_batch
from freemoe.serve.engine.engine import InferenceEngine
from freemoe.serve.engine.requests import (
    ContextError,
    EngineError,
    QueueFullError,
    SequenceRequest,
    SlowReaderError,
    StoppingError,
)
from freemoe.serve.settings import EngineLimits
from tests.domain_experts.test_mixture import bits, unchanged
from tests.domain_experts.test_threads import experts_on
from tests.serve.conftest import NAN, alone, ask, engine_on, idle, read, wait_events
from tests.tiny import tiny_model, tiny_tokenizer

NAMES = ["base", "a", "b", "c+d", "b&d"]
PROMPTS = ["court?", "12+7=", "a treaty of 1919", "x", "the longest prompt of them all, read in several parts"]


def test_texts_are_those_of_each_prompt_alone_however_they_are_mixed(moe):
    before = bits(moe.model)
    true = {(p, n): alone(moe, p, n) for p in PROMPTS for n in NAMES}
    assert len(set(true.values())) > 15
    with engine_on(moe, batch=5, prefill=7) as engine:
        rng = random.Random(0)
        wrong = []

        def client(seed):
            mine = random.Random(seed)
            for _ in range(6):
                several = [(mine.choice(PROMPTS), mine.choice(NAMES)) for _ in range(mine.randint(1, 3))]
                tokens = [mine.randint(1, 12) for _ in several]
                boxes = engine.submit([ask(moe, p, n, t) for (p, n), t in zip(several, tokens, strict=True)])
                if mine.random() < 0.2:
                    boxes.pop().close()
                for box, key in zip(boxes, several, strict=False):
                    found = read(box)
                    if found.error or not true[key].startswith(found.text.rstrip("�")):
                        wrong.append((key, found))
                time.sleep(rng.random() * 0.01)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(client, range(8)))
        whole = [(key, read(engine.submit([ask(moe, *key)])[0]).text) for key in true]
        assert wrong == []
        assert [key for key, text in whole if text != true[key]] == []
        assert idle(engine)
    assert unchanged(moe.model, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_invariant_answers_are_the_same_bits_whoever_else_asks(dtype):
    model = tiny_model("llama").to(dtype)
    moe = FreeMoE(model, experts_on(model), None, tiny_tokenizer())
    keys = list(zip(PROMPTS * 2, [*NAMES, *NAMES[::-1]], strict=True))
    asks = [ask(moe, *key, tokens=5, logprobs=2, echo=True) for key in keys]
    with engine_on(moe, batch=7, prefill=9, batch_invariant=True) as engine:
        single = [read(engine.submit([one])[0]) for one in asks]
        beside = [read(box) for box in engine.submit(asks)]
    # All numbers, not the likeliest tokens alone.
    assert [(one.tokens, one.read) for one in beside] == [(one.tokens, one.read) for one in single]
    with engine_on(moe, batch=7, prefill=64, batch_invariant=True) as engine:
        texts = [read(box).text for box in engine.submit([ask(moe, *key, tokens=5) for key in keys])]
    assert texts == [alone(moe, *key, tokens=5) for key in keys]


def test_what_is_drawn_depends_on_the_seed_and_not_on_the_neighbours(moe):
    how = {"sampling": SamplingConfig(1, 1.0, 0.9, seed=7), "top_k": 40}
    with engine_on(moe) as engine:
        first = read(engine.submit([ask(moe, "court?", "a", **how)])[0]).text
        boxes = engine.submit([ask(moe, p, n) for p in PROMPTS for n in ("base", "a")])
        [beside] = engine.submit([ask(moe, "court?", "a", **how)])
        assert read(beside).text == first
        for box in boxes:
            read(box)
        other = [read(b).text for b in engine.submit([ask(moe, "court?", "a", choice=i, **how) for i in range(4)])]
    assert other[0] == first
    assert len(set(other)) == 4


def test_penalties_and_top_k(moe):
    with engine_on(moe) as engine:
        once = read(engine.submit([ask(moe, "court?", tokens=20, presence=100.0, logprobs=0)])[0])
        likeliest = read(engine.submit([ask(moe, "court?", sampling=SamplingConfig(1, 2.0, 1.0, 3), top_k=1)])[0])
    ids = [token.id for token in once.tokens]
    assert len(set(ids)) == len(ids) >= 19
    assert likeliest.text == alone(moe, "court?")


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_min_p_draws_from_tokens_of_that_share_alone(temperature):
    logits = torch.tensor([4.0, 3.0, 2.0, 0.0])
    shares = (logits / temperature).softmax(0)
    drawn = set()
    for seed in range(300):
        chooser = TokenSampler(SequenceRequest((9,), "base", 1, SamplingConfig(1, temperature, 1, seed), min_p=0.2))
        drawn.add(*sample_batch([chooser], logits[None]))
    assert drawn == set((shares >= 0.2 * shares.max()).nonzero()[:, 0].tolist())
    assert 1 < len(drawn) < 4 or temperature == 0.5


def test_a_repetition_penalty_is_transformers_s():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.tensor([2.0, -1.0, 1.9, 1.5, -0.5])
    chooser = TokenSampler(SequenceRequest((0, 1, 0), "base", 3, repetition=1.4))
    prompt = [0, 1, 0]
    for _ in range(3):
        true = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prompt]), logits[None].clone())[0].argmax()
        prompt += sample_batch([chooser], logits[None])
        assert prompt[-1] == int(true)
    assert prompt[3:] == [2, 3, 0]


def test_rows_that_are_drawn_together_get_what_each_gets_alone():
    generator = torch.Generator().manual_seed(0)
    cold = {"sampling": SamplingConfig(1, 0.7, 0.8, 1), "presence": 0.4}
    warm = {"sampling": SamplingConfig(1, 1.5, 1.0, 2), "top_k": 9}
    wishes = [{}, cold, {"repetition": 1.3}, warm, cold, {"frequency": 0.2}, {**warm, "min_p": 0.1, "repetition": 1.2}]
    asks = [SequenceRequest((3, 1, n), "base", 6, choice=n, **wish) for n, wish in enumerate(wishes)]
    alone, together = [TokenSampler(ask) for ask in asks], [TokenSampler(ask) for ask in asks]
    drawn = []
    for _ in range(6):
        logits = torch.randn(len(asks), 40, generator=generator) * 2
        drawn.append(sample_batch(together, logits))
        assert drawn[-1] == [sample_batch([one], own[None])[0] for one, own in zip(alone, logits, strict=True)]
    assert any(step[1] != step[4] for step in drawn)
    tops = [3, None, 0, 5, 3, None, 50]
    likely = gather_logprobs(logits, drawn[-1], tops)
    assert [(own is None, len(best)) for own, best in likely] == [(t is None, min(t or 0, 40)) for t in tops]
    for row, (top, token) in enumerate(zip(tops, drawn[-1], strict=True)):
        assert likely[row] == gather_logprobs(logits[row][None], [token], [top])[0]
        scores = logits[row].log_softmax(-1)
        assert likely[row][0] in (None, float(scores[token]))
        assert all(value == float(scores[one]) for one, value in likely[row][1])


def test_log_probabilities_are_the_model_s(moe):
    prompt = moe.tokenizer("a treaty")["input_ids"]
    with engine_on(moe, prefill=3) as engine:
        found = read(engine.submit([ask(moe, "a treaty", "b", 4, logprobs=3, echo=True)])[0])
    ids = [*prompt, *(token.id for token in found.tokens)]
    with torch.no_grad():
        scores = moe(torch.tensor([ids]), expert="b").logits[0].log_softmax(-1)
    assert [t.id for t in found.read] == prompt
    assert found.read[0].logprob is None
    for place, token in enumerate([*found.read, *found.tokens]):
        if place:
            assert token.logprob == pytest.approx(float(scores[place - 1, token.id]), abs=1e-4)
            best = scores[place - 1].topk(3)
            assert [i for i, _ in token.top] == best.indices.tolist()
            assert [v for _, v in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert "".join(moe.tokenizer.decode([t.id]) for t in found.read) == "a treaty"
    assert [t.offset for t in found.read] == list(range(len("a treaty")))


def test_stop_texts_end_an_answer(moe):
    whole = alone(moe, "court?", "a")
    for stop in (whole[3:5], whole[5]):
        with engine_on(moe) as engine:
            found = read(engine.submit([ask(moe, "court?", "a", stop=(stop, "never"), logprobs=0)])[0])
        assert found.reason == "stop"
        assert found.text == whole[: whole.find(stop)]
        assert all(token.offset < max(1, len(found.text)) for token in found.tokens)


def test_the_end_of_text_ends_an_answer(moe, monkeypatch):
    first = moe.tokenizer(alone(moe, "court?", tokens=1), add_special_tokens=False)["input_ids"][0]
    monkeypatch.setattr(moe.model.generation_config, "eos_token_id", [2, first])
    with engine_on(moe) as engine:
        found = read(engine.submit([ask(moe, "court?")])[0])
    assert (found.text, found.reason) == ("", "stop")


def test_nan_ends_the_one_request_and_no_other(moe):
    with engine_on(moe) as engine:
        boxes = engine.submit([ask(moe, p) for p in PROMPTS])
        [bad] = engine.submit([SequenceRequest((5, NAN, 6), "base", 5)])
        failed, found = read(bad), [read(box).text for box in boxes]
        after = read(engine.submit([ask(moe, PROMPTS[0])])[0]).text
    assert isinstance(failed.error, NumericError)
    assert "NaN" in str(failed.error)
    assert found == [alone(moe, p) for p in PROMPTS]
    assert after == found[0]


def test_who_has_read_an_end_finds_it_counted(moe):
    ends = []
    with engine_on(moe) as engine:
        count = engine._scheduler._watch.record_sequence_end
        engine._scheduler._watch.record_sequence_end = lambda *end: (time.sleep(0.1), count(*end), ends.append(end[1]))
        for prompt, how in (((5, 6), "length"), ((5, NAN, 6), "error")):
            read(engine.submit([SequenceRequest(prompt, "base", 2)])[0])
            assert ends[-1:] == [how]


def test_an_error_of_the_model_ends_what_it_touches_and_the_engine_goes_on(moe):
    with engine_on(moe) as engine:
        run = engine.runner.forward

        def forward(rows):
            if any(row.expert == "c" for row in rows):
                raise RuntimeError("broken in the middle")
            return run(rows)

        engine.runner.forward = forward
        failed = read(engine.submit([ask(moe, "x", "c")])[0])
        assert str(failed.error) == "broken in the middle"
        assert read(engine.submit([ask(moe, "x", "a")])[0]).text == alone(moe, "x", "a")


@pytest.mark.parametrize(
    ("part", "method", "error"),
    [
        ("_scheduler", "admit_waiting", RuntimeError),
        ("_scheduler", "step", SystemExit),
        ("_scheduler", "report_queue_sizes", RuntimeError),
        ("runner", "add_sequence", RuntimeError),
        ("runner", "release_model", SystemExit),
    ],
)
def test_an_engine_that_fails_tells_all_who_wait_and_takes_nobody_else(caplog, part, method, error):
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=128)
    own = FreeMoE(model, experts_on(model, "ab"), None, tiny_tokenizer())
    before, begun, go_on = bits(model), threading.Event(), threading.Event()
    engine = InferenceEngine(own, EngineLimits(128, batch=1)).start()
    blocked = engine.run_between_steps(lambda: (begun.set(), go_on.wait(20)))
    begun.wait(20)
    boxes = engine.submit([ask(own, "x", "a", 90)] * 3)
    futures = [engine.drop_expert("b"), engine.run_between_steps(lambda: 1)]
    true = getattr(getattr(engine, part), method)

    def fail(*arguments):
        # Once, so that what has to be put back can be.
        setattr(getattr(engine, part), method, true)
        raise error("planted")

    setattr(getattr(engine, part), method, fail)
    go_on.set()
    blocked.result(20)
    answers = [read(box, 20) for box in boxes]
    assert any(isinstance(answer.error, EngineError) for answer in answers)
    assert all(isinstance(answer.error, EngineError | None) for answer in answers)
    for future in futures:
        assert isinstance(future.exception(20), EngineError | None)
    engine.stop()
    assert (engine.is_alive, engine.num_unfinished, str(engine.failure)) == (False, 0, "planted")
    for late in (lambda: engine.submit([ask(own, "x")]), lambda: engine.drop_expert("a")):
        with pytest.raises(EngineError):
            late()
    assert isinstance(engine.run_between_steps(lambda: 1).exception(1), EngineError)
    assert "planted" in caplog.text
    assert own.active == "base"
    assert unchanged(model, before)


def test_who_is_gone_frees_the_slot(moe):
    with engine_on(moe, batch=1) as engine:
        [first] = engine.submit([ask(moe, "x", tokens=100)])
        [second, third] = engine.submit([ask(moe, "court?", tokens=3), ask(moe, "court?", tokens=3)])
        wait_events(first)
        second.close()
        first.close()
        assert read(third).text == alone(moe, "court?", tokens=3)
        assert idle(engine)


def test_a_reader_that_does_not_read_loses_its_answer_and_holds_up_nobody(moe):
    with engine_on(moe, pieces=4) as engine:
        [slow] = engine.submit([ask(moe, "x", tokens=60)])
        assert read(engine.submit([ask(moe, "court?", tokens=3)])[0]).text == alone(moe, "court?", tokens=3)
        assert idle(engine)
        found = read(slow)
    assert isinstance(found.error, SlowReaderError)
    assert found.pieces <= 4


def test_a_long_prompt_does_not_stall_who_is_writing(moe):
    with engine_on(moe, prefill=5) as engine:
        seen = []
        run = engine.runner.forward
        engine.runner.forward = lambda rows: seen.append([len(row.tokens) for row in rows]) or run(rows)
        [writing] = engine.submit([ask(moe, "x", tokens=60)])
        wait_events(writing)
        engine.submit([SequenceRequest(tuple([7] * 40), "base", 1)])
        read(writing)
    parts = [i for i, rows in enumerate(seen) if rows == [5]]
    assert len(parts) == 8
    # Between two parts of the prompt the other sequence got a token.
    assert all([1] in seen[a + 1 : b] for a, b in itertools.pairwise(parts))


def test_what_is_refused(moe):
    with engine_on(moe, queue=2, batch=1) as engine:
        for ids, expert, tokens, error in (
            ((), "base", 1, DataError),
            ((5,) * 120, "base", 10, ContextError),
            ((5,), "nobody", 1, UnknownNameError),
            ((5,), "auto", 1, DataError),
        ):
            with pytest.raises(error):
                engine.submit([SequenceRequest(ids, expert, tokens)])
        with pytest.raises(QueueFullError, match="queue of 2"):
            engine.submit([ask(moe, "x")] * 4)
        assert idle(engine)
        engine.close()
        with pytest.raises(StoppingError):
            engine.submit([ask(moe, "x")])
        with pytest.raises(UnknownNameError):
            engine.drop_expert("nobody")


def test_any_number_of_combinations_is_answered_and_those_used_last_are_held(moe, monkeypatch):
    """One after the other, with room for a few masks alone: the ones that nobody uses go."""
    names = [sign.join(some) for sign in "+&" for n in (2, 3, 4) for some in itertools.permutations("abcd", n)]
    boards = moe._mixed_board, moe._board
    for board in boards:
        monkeypatch.setattr(board, "_most_bytes", 1)
    with engine_on(moe) as engine:
        for name in names[:70]:
            answer = read(engine.submit([ask(moe, "x", name, 1)])[0])
            assert answer.error is None or "is the base itself" in str(answer.error)
    assert all(len(set(board.expert_names) & set(names)) <= 2 for board in boards)


def test_experts_go_when_those_who_asked_for_them_have_their_answers(moe):
    own = FreeMoE(moe.model, experts_on(moe.model, "ab"), None, moe.tokenizer)
    with engine_on(own) as engine:
        boxes = engine.submit([ask(own, "court?", "a", 40), ask(own, "court?", "a+b", 40)])
        gone = engine.drop_expert("a")
        assert engine.experts == ["b"]
        for name in ("a", "a+b"):
            with pytest.raises(UnknownNameError):
                engine.submit([ask(own, "x", name)])
        assert [read(box).text for box in boxes] == [alone(moe, "court?", n, 40) for n in ("a", "a+b")]
        gone.result(30)
        assert own.experts == ["b"]
        assert read(engine.submit([ask(own, "x", "b")])[0]).text == alone(moe, "x", "b")


def test_jobs_are_done_between_steps_and_fail_alone(moe):
    with engine_on(moe) as engine:
        [box] = engine.submit([ask(moe, "court?", "a", 40)])
        assert engine.run_between_steps(lambda: moe.active).result(30) == "base"
        with pytest.raises(ZeroDivisionError):
            engine.run_between_steps(lambda: 1 // 0).result(30)
        assert read(box).text == alone(moe, "court?", "a", 40)


def test_the_end_is_an_error_for_what_has_not_ended(moe):
    engine = InferenceEngine(moe, EngineLimits(128, batch=1)).start()
    boxes = engine.submit([ask(moe, "x", tokens=100)] * 3)
    engine.stop()
    assert {type(read(box).error) for box in boxes} <= {StoppingError, type(None)}
    with pytest.raises(StoppingError):
        engine.run_between_steps(lambda: 1).result(1)
    assert moe.active == "base"
