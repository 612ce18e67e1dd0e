"""The scorer against lm-eval's own backend, and against one plain forward per row."""

import math
import random
import warnings
from types import SimpleNamespace

import pytest
import torch

from freemoe.core.errors import DataError, NumericError, RecipeError
from freemoe.evals.engine.scorer import Scorer, TokenPair, context_length
from freemoe.evals.tasks.documents import Document
from tests.tiny import tiny_model, tiny_tokenizer

FAMILIES = ["llama", "gemma2", "gpt2", "opt"]
CONTEXT = 256


def text(rng, length):
    return "".join(rng.choice("abc XYZ?é\n1") for _ in range(length))


def random_pairs(count=40):
    """Answers of one and many tokens, choices that share a context, spaces at ends, no context, overlong."""
    rng = random.Random(7)
    pairs = []
    while len(pairs) < count - 8:
        context = text(rng, rng.randrange(1, 60)) + rng.choice(["", " ", "  "])
        if not context.strip():
            continue
        kind = len(pairs) % 3
        if kind == 0:
            pairs += [(context, f" {letter}") for letter in "ABC"]
        elif kind == 1:
            pairs.append((context, rng.choice("xyz")))
        else:
            pairs.append((context, " " + text(rng, rng.randrange(2, 20)).strip() + "."))
    pairs = pairs[: count - 8]
    pairs += [("", "start"), ("", "s"), ("", "longer text. " * 4)]
    pairs += [(text(rng, n) + "!", answer) for n, answer in ((255, "a"), (256, "a"), (400, " many of them"))]
    pairs += [("q" * 300, " A"), ("q" * 300, " B")]
    assert len(pairs) == count
    return pairs


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def hflm(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.models.huggingface import HFLM

        how = {"batch_size": 4, "max_length": CONTEXT, "softmax_dtype": "float32"}
        return HFLM(pretrained=model, tokenizer=tiny_tokenizer(), **how)


def slow(model, scorer, pair):
    """One row, every position, fp32 log-softmax, one token at a time."""
    ids = [*pair.context, *pair.continuation][-(scorer.max_length + 1) :]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0].double()
    answer = len(pair.continuation)
    total, greedy = 0.0, True
    for k in range(answer):
        row = logits[len(ids) - 1 - answer + k]
        total += float(torch.log_softmax(row, 0)[pair.continuation[k]])
        greedy = greedy and int(row.argmax()) == pair.continuation[k]
    return total, greedy


@pytest.mark.filterwarnings("ignore")
def test_loglikelihoods_equal_lm_evals_and_the_slow_way(model, hflm):
    from lm_eval.api.instance import Instance

    pairs = random_pairs()
    scorer = Scorer(model, tiny_tokenizer(), batch_tokens=700)
    # Greedy answers too, so that is_greedy is not False everywhere.
    best = scorer.generate([c for c, _ in pairs[:6]], (), 1)
    pairs += [(c, b) for (c, _), b in zip(pairs, best, strict=False) if b.strip() and c == c.rstrip()]
    ours = scorer.loglikelihoods(pairs)
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    theirs = hflm.loglikelihood(requests, disable_tqdm=True)
    for pair, (ll, greedy), (their_ll, their_greedy) in zip(pairs, ours, theirs, strict=True):
        assert ll == pytest.approx(their_ll, abs=2e-4), pair
        assert greedy == their_greedy, pair
        slow_ll, slow_greedy = slow(model, scorer, scorer.encode_pair(*pair))
        assert ll == pytest.approx(slow_ll, abs=2e-4), pair
        assert greedy == slow_greedy, pair
    parts = [scorer.encode_pair(*pair) for pair in pairs]
    cut = sum(len(p.context) + len(p.continuation) > CONTEXT + 1 for p in parts)
    assert scorer.truncated == {"": cut}
    assert cut >= 4


@pytest.mark.filterwarnings("ignore")
def test_generations_equal_lm_evals(model, hflm):
    from lm_eval.api.instance import Instance

    rng = random.Random(3)
    prompts = [text(rng, n).strip() + "?" for n in (3, 9, 17, 17, 40, 80, 245, 300)]
    scorer = Scorer(model, tiny_tokenizer(), batch_tokens=800)
    free = scorer.generate(prompts, (), 12)
    # Stop strings that do occur: one early in a text, one of two characters, one that never comes.
    until = [stop for stop in (free[0][4:5], free[3][5:7], "never") if stop.strip()]
    for stop, new in (([], 12), (until, 12), (until[:1], 20)):
        how = {"until": list(stop), "max_gen_toks": new, "do_sample": False}
        requests = [Instance("generate_until", {}, (prompt, how), i) for i, prompt in enumerate(prompts)]
        assert scorer.generate(prompts, stop, new) == hflm.generate_until(requests, disable_tqdm=True)
    cut = scorer.generate(prompts, until, 12)
    assert cut != free
    for whole, part in zip(free, cut, strict=True):
        assert whole.startswith(part)
        assert not any(stop in part for stop in until)


def test_generation_ends_at_the_end_of_text_token():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    scorer = Scorer(model, tokenizer)
    (whole,) = scorer.generate(["abc"], (), 8)
    ids = scorer.encode("abc")
    produced = []
    for _ in range(8):
        produced.append(int(model(input_ids=torch.tensor([ids + produced])).logits[0, -1].argmax()))
    assert whole == tokenizer.decode(produced, skip_special_tokens=True)
    at = next(i for i in range(1, 8) if produced[i] not in produced[:i])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(produced[at])
    assert tokenizer.eos_token_id == produced[at]
    (short,) = Scorer(model, tokenizer).generate(["abc"], (), 8)
    assert short == tokenizer.decode(produced[:at], skip_special_tokens=True)


class Canned(torch.nn.Module):
    """Answers with logits that are given, whatever it is asked."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits
        self.device = torch.device("cpu")
        self.config = SimpleNamespace(max_position_embeddings=64)

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.logits[: len(input_ids), : input_ids.shape[1]])


def test_half_precision_is_summed_in_single():
    logits = torch.randn(1, 40, 300, generator=torch.Generator().manual_seed(0)).mul(4).to(torch.bfloat16)
    ids = tuple(range(3, 33))
    (found,) = Scorer(Canned(logits), tiny_tokenizer()).score([TokenPair(ids[:5], ids[5:])])
    rows = logits[0, 4:29]
    exact, rough = (torch.log_softmax(r, -1)[range(25), ids[5:]].sum() for r in (rows.double(), rows))
    assert found.loglikelihood == pytest.approx(float(exact), abs=1e-3)
    assert abs(float(rough - exact)) > 0.01
    assert found.tokens == 25


def test_nan_is_an_error():
    scorer = Scorer(Canned(torch.full((1, 10, 300), math.nan)), tiny_tokenizer())
    with pytest.raises(NumericError, match="NaN"):
        scorer.score([TokenPair((3, 4), (5,))])


def test_a_text_follows_its_beginning_token():
    scorer = Scorer(tiny_model("llama"), tiny_tokenizer())
    assert scorer.text_pair([5, 6]) == TokenPair((1,), (5, 6))
    assert scorer.text_pair([1, 5, 6]) == TokenPair((1,), (5, 6))
    document = Document("t", "1", "k", "text", "", answers=("ab",), tokens=(9, 8, 7))
    assert scorer.document_pairs(document) == [TokenPair((1,), (9, 8, 7))]
    assert scorer.prompt_ids(document) == (9, 8, 7)
    given = Document("t", "1", "k", "text", "", answers=("ab",), tokens=(9, 8, 7), given=1)
    assert scorer.document_pairs(given) == [TokenPair((9,), (8, 7))]
    scorer.tokenizer.bos_token = scorer.tokenizer.eos_token = None
    assert scorer.prefix_id is None
    assert scorer.text_pair([5, 6]) == TokenPair((5,), (6,))


def test_gold_pairs():
    scorer = Scorer(tiny_model("llama"), tiny_tokenizer())
    choice = Document("t", "1", "k", "choice", "Q?", answers=(" a", " b"), gold=1, reference=" b")
    assert scorer.gold_pair(choice) == scorer.encode_pair("Q?", " b")
    free = Document("t", "1", "k", "generate", "Q?", reference=" r")
    assert scorer.gold_pair(free) == scorer.encode_pair("Q?", " r")
    with pytest.raises(DataError, match="no gold answer"):
        scorer.gold_pair(Document("t", "1", "k", "generate", "Q?"))
    with pytest.raises(DataError, match="no tokens of its own"):
        scorer.encode_pair("some", "")


def test_overlong_prompts_are_cut_from_the_left_or_refused():
    model = tiny_model("llama")
    scorer = Scorer(model, tiny_tokenizer(), max_length=10)
    pair = scorer.fit_to_context(TokenPair(tuple(range(100, 112)), (7, 8)), "mine")
    assert pair == (tuple(range(103, 112)), (7, 8))
    assert pair.inputs == (*range(103, 112), 7)
    assert scorer.truncated == {"mine": 1}
    whole = TokenPair(tuple(range(100, 109)), (7, 8))
    assert scorer.fit_to_context(whole) == whole
    assert scorer.truncated == {"mine": 1}
    strict = Scorer(model, tiny_tokenizer(), max_length=10, overflow="error")
    strict.score([whole])
    with pytest.raises(DataError, match=r"'mine' has 12 tokens .* is 10"):
        strict.score([TokenPair(tuple(range(100, 110)), (7, 8))], ["mine"])
    with pytest.raises(DataError, match="leaves room for 4"):
        strict.generate(["five!"], (), 6)
    with pytest.raises(RecipeError, match="no room"):
        scorer.generate(["a"], (), 10)

    # An answer cannot be cut.
    scorer.score([TokenPair((5,), tuple(range(10, 20)))])
    with pytest.raises(DataError, match=r"'mine' has 11 tokens, more than the model's context of 10"):
        scorer.score([TokenPair((5,), tuple(range(10, 21)))], ["mine"])


def test_bad_arguments():
    with pytest.raises(DataError, match="no tokenizer"):
        Scorer(tiny_model("llama"), None)


def test_context_length():
    assert context_length(tiny_model("gpt2")) == 256
    bare = SimpleNamespace(config=SimpleNamespace())
    assert context_length(bare, SimpleNamespace(model_max_length=77)) == 77
    assert context_length(bare, SimpleNamespace(model_max_length=10**30)) == 2048
