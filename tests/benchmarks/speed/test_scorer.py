"""The scorer's benchmark runs, and raises rather than measure unequal answers."""

import pytest

from benchmarks.harness import Settings
from benchmarks.speed import scorer as bench
from freemoe.core.errors import NumericError
from freemoe.evals.engine.scorer import TokenPair

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval and its libraries warn of their own affairs


def test_a_quick_run_has_every_figure():
    outcome = bench.run(Settings(quick=True))
    assert [f.target for f in outcome.figures] == [6.0, None, None, 15.0]
    assert all(f.value > 0 for f in outcome.figures)
    for name, found in outcome.details.items():
        if isinstance(found, dict):
            assert found["largest_difference_nats"] < 1e-4, name
            assert set(found["seconds"]) == {"freemoe", "lm-eval"}
            assert found["ideal"] > 2


def test_tokens_are_counted_once():
    rows = ((1, 2, 3), (4,)), ((1, 2, 3), (5,)), ((1, 2), (3, 7, 8)), ((9,), (9,))
    pairs = [TokenPair(*row) for row in rows]
    assert bench._tokens_whole(pairs) == 3 + 4 + 1
    assert bench._tokens_once(pairs) == 3 + 1 + 1


@pytest.fixture
def contest():
    settings = Settings(quick=True)
    documents = bench.questions(bench.QUICK_SHORT, 90, 0)
    return bench.Contest(bench.letters_model(90, settings), bench.word_tokenizer(90), documents, settings)


def test_another_answer_is_an_error(contest, monkeypatch):
    theirs = contest.rival._loglikelihood_tokens(contest.tokens, disable_tqdm=True)
    for sign, by, said in ((-1, 0, "answered differently"), (1, 2e-3, r"differ from lm-eval's by 0\.002")):
        other = [(sign * value + by, greedy) for value, greedy in theirs]
        monkeypatch.setattr(contest.rival, "_loglikelihood_tokens", lambda *a, other=other, **k: other)
        with pytest.raises(NumericError, match=said):
            contest.figure("another", None)


def test_without_sharing_there_is_nothing_to_measure(contest):
    contest.scorer.fallback = "it cannot"
    with pytest.raises(NumericError, match="it cannot"):
        contest.figure("none", None)
