"""T1: choice scoring against lm-eval's HF backend on one model, with equal answers.

Both sides score the same pre-tokenised requests through their public calls, all Python included: ours through
`Scorer.score`, lm-eval's through ``HFLM._loglikelihood_tokens`` at the batch size that is fastest for it, with fp32
softmax. As in a search, the requests are scored again and again; what each side keeps between calls, it keeps. Scoring
text for the first time, tokenising included, is measured beside it.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.compat import answers_of, own_backend
from benchmarks.harness import Figure, Outcome, Settings, in_turns, ratio
from freemoe.core.errors import NumericError
from freemoe.evals.engine.scorer import Scorer, TokenPair
from freemoe.evals.tasks.harness.rows import require_lm_eval

BATCH_SIZES = (1, 4, 8, 16, 32)
# Requests that each batch size is tried on.
SAMPLE = 128
TEXT_ROUNDS = 2
CONTEXT = 1024
# Rounding differs between batches; more than this would be another answer.
CLOSE = 1e-3


@dataclass(frozen=True)
class Shape:
    """Lengths, in tokens, of a made-up benchmark of questions with four choices."""

    subjects: int  # Few-shot prefixes
    documents: int  # Per subject
    shared: int  # Tokens of a prefix
    own: tuple[int, int]  # Fewest and most tokens of a question
    answer: tuple[int, int]  # Fewest and most tokens of a choice; with one token the choices are the same four letters


# 318 tokens of context, 276 of them shared: 5-shot MMLU, whose subjects have 100 test documents and more. With the
# large vocabulary lm-eval takes minutes, so there are fewer.
LETTERS = Shape(3, 100, 276, (30, 54), (1, 1))
FEWER_LETTERS = Shape(2, 50, 276, (30, 54), (1, 1))
SHORT = Shape(1, 120, 0, (12, 48), (2, 8))
QUICK_LETTERS = Shape(2, 4, 40, (6, 10), (1, 1))
QUICK_SHORT = Shape(1, 6, 0, (8, 12), (2, 4))
# Vocabulary, shape, target.
CONTESTS = ((722, LETTERS, 6.0), (32000, FEWER_LETTERS, 15.0))
QUICK_CONTESTS = ((90, QUICK_LETTERS, 6.0), (300, QUICK_LETTERS, 15.0))

Text = tuple[str, str]


def run(settings: Settings) -> Outcome:
    """Measure letters behind few-shot prefixes at two vocabularies, and choices of several tokens."""
    require_lm_eval("bench scorer")
    figures: list[Figure] = []
    details: dict[str, Any] = {"threads": torch.get_num_threads(), "rounds": settings.rounds}
    contests = QUICK_CONTESTS if settings.quick else CONTESTS
    short = QUICK_SHORT if settings.quick else SHORT
    with settings.progress.stage("scorer", len(contests) + 1) as advance:
        for number, (size, letters, target) in enumerate(contests):
            model, tokenizer = letters_model(size, settings), word_tokenizer(size)
            contest = Contest(model, tokenizer, questions(letters, size, settings.seed), settings)
            figures.append(contest.figure(f"5-shot letters, vocabulary {size}", target))
            details[f"letters, vocabulary {size}"] = contest.details
            advance(1)
            if number == 0:
                figures.append(contest.figure_from_text())
                contest = Contest(model, tokenizer, questions(short, size, settings.seed), settings)
                figures.append(contest.figure(f"choices of several tokens, no shots, vocabulary {size}", None))
                details[f"several tokens, vocabulary {size}"] = contest.details
                advance(1)
    return Outcome(tuple(figures), details)


class Contest:
    """One set of requests, for every document its (context, choice) texts, scored by both sides on one model."""

    def __init__(self, model: Any, tokenizer: Any, documents: list[list[Text]], settings: Settings) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.choices = [len(d) for d in documents]
        self.texts = [text for d in documents for text in d]
        self.scorer = Scorer(model, tokenizer)
        self.pairs = [self.scorer.encode_pair(*text) for text in self.texts]
        self.tokens = [(t, list(p.context), list(p.continuation)) for t, p in zip(self.texts, self.pairs, strict=True)]
        whole, once = _tokens_whole(self.pairs), _tokens_once(self.pairs)
        self.details: dict[str, Any] = {
            "documents": len(documents),
            "tokens_if_every_row_is_run_whole": whole,
            "tokens_if_prefixes_are_run_once": once,
            "ideal": round(whole / once, 2),
        }
        # lm-eval's backend at the best of several batch sizes, each tried once after a first call.
        times: dict[int, float] = {}
        sample = self.tokens[:SAMPLE]
        for size in BATCH_SIZES[1:3] if settings.quick else BATCH_SIZES:
            backend = self._hflm(size)
            answers_of(backend, sample[: 4 * size])
            began = time.perf_counter()
            answers_of(backend, sample)
            times[size] = time.perf_counter() - began
        self.batch_size = min(times, key=lambda size: times[size])
        self.details["rival_seconds_by_batch_size"] = {str(k): round(v, 3) for k, v in times.items()}
        self.details["rival_batch_size"] = self.batch_size
        self.rival = self._hflm(self.batch_size)

    def _hflm(self, size: int) -> Any:
        return own_backend(self.model, self.tokenizer, batch_size=size, max_length=CONTEXT, softmax_dtype="float32")

    def _same_answers(self) -> float:
        """Compare both sides' answers; returns the largest difference of a log-likelihood in nats."""
        if self.scorer.fallback:
            raise NumericError(f"Prefixes are not shared, so there is nothing to measure: {self.scorer.fallback}")
        ours = [s.loglikelihood for s in self.scorer.score(self.pairs)]
        theirs = [s[0] for s in answers_of(self.rival, self.tokens)]
        worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        start = 0
        for number, count in enumerate(self.choices):
            a, b = ours[start : start + count], theirs[start : start + count]
            if a.index(max(a)) != b.index(max(b)):
                raise NumericError(f"Document {number} is answered differently: {a} here, {b} by lm-eval.")
            start += count
        if not worst <= CLOSE:
            raise NumericError(f"Log-likelihoods differ from lm-eval's by {worst:.2g} nats; at most {CLOSE:g} may be.")
        return worst

    def figure(self, name: str, target: float | None) -> Figure:
        """Time both sides on pre-tokenised requests."""
        worst = self._same_answers()
        sides = {
            "freemoe": lambda: self.scorer.score(self.pairs),
            "lm-eval": lambda: answers_of(self.rival, self.tokens),
        }
        # Both have just answered.
        seconds = in_turns(sides, self.settings.rounds, warm=False)
        self.details |= {"seconds": _rounded(seconds), "largest_difference_nats": worst}
        note = (
            f"answers equal, largest difference {worst:.1g} nats; lm-eval at batch size {self.batch_size}; "
            f"ideal by tokens {self.details['ideal']:g}x"
        )
        return Figure(name, ratio(seconds, "lm-eval", "freemoe"), target, note=note)

    def figure_from_text(self) -> Figure:
        """Time both sides from text to answers, nothing kept from an earlier call."""
        from lm_eval.api.instance import Instance

        requests = [Instance("loglikelihood", {}, text, i) for i, text in enumerate(self.texts)]
        sides = {
            "freemoe": lambda: Scorer(self.model, self.tokenizer).loglikelihoods(self.texts),
            "lm-eval": lambda: self.rival.loglikelihood(requests, disable_tqdm=True),
        }
        seconds = in_turns(sides, min(TEXT_ROUNDS, self.settings.rounds), warm=False)
        self.details["seconds_from_text"] = _rounded(seconds)
        name = "the same, first call, from text"
        return Figure(name, ratio(seconds, "lm-eval", "freemoe"), note="tokenising and planning included")


def _rounded(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {side: [round(s, 4) for s in values] for side, values in seconds.items()}


def _tokens_whole(pairs: Sequence[TokenPair]) -> int:
    """Tokens of every different input: choices that differ in their last token only are one."""
    return sum(len(ids) for ids in {pair.context + pair.continuation[:-1] for pair in pairs})


def _tokens_once(pairs: Sequence[TokenPair]) -> int:
    """Tokens when every beginning that two rows share is run once."""
    rows = sorted({pair.context + pair.continuation[:-1] for pair in pairs})
    total = len(rows[0])
    for before, row in itertools.pairwise(rows):
        common = next((i for i, (a, b) in enumerate(zip(before, row, strict=False)) if a != b), len(before))
        total += len(row) - common
    return total


def letters_model(vocabulary: int, settings: Settings) -> Any:
    """A random Llama of four layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = 64 if settings.quick else 256
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size,
        intermediate_size=size * 8 // 3 // 16 * 16,
        num_hidden_layers=2 if settings.quick else 4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:  # large enough that the choices lie apart
                torch.nn.init.normal_(parameter, std=1 / math.sqrt(size))
    return model.eval()


def word_tokenizer(vocabulary: int) -> Any:
    """One token per word; the words are ``w3``, ``w4`` ... behind three special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=CONTEXT
    )


def questions(shape: Shape, vocabulary: int, seed: int) -> list[list[Text]]:
    """Documents of a shape; four choices each, which begin with different words."""
    rng = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(f"w{rng.randrange(3, vocabulary)}" for _ in range(count))

    letters = [f" w{3 + i}" for i in range(4)]
    found = []
    for _ in range(shape.subjects):
        shared = words(shape.shared)
        for _ in range(shape.documents):
            context = f"{shared} {words(rng.randint(*shape.own))}".strip()
            lengths = [rng.randint(*shape.answer) for _ in letters]
            found.append([(context, f"{c} {words(n - 1)}".rstrip()) for c, n in zip(letters, lengths, strict=True)])
    return found
