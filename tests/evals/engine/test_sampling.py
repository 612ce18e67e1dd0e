"""Sampled programs: the same whatever the batch, drawn from the right distribution, counted as Chen et al. do."""

import numpy as np
import pytest
import torch

from freemoe.core.errors import DataError, NumericError
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.evals.engine.sampling import GREEDY, SamplingConfig, sampling_of, tokens_to_list
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.sandbox.runner import passed_at
from freemoe.evals.summary import summarise_scores
from freemoe.evals.tasks.documents import Document
from freemoe.evals.tasks.domains import load_domain, make_task
from freemoe.evals.tasks.task import TaskGrader
from freemoe.recipes import DataSection, EvalRecipe
from tests.rows import write_rows
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = ["a", "some text", "another text that is longer", "b", "some text"]
WARM = SamplingConfig(4, 1.5, 0.9, seed=3)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def test_samples_are_the_same_whatever_the_batch(model):
    def samples(prompts=PROMPTS, sampling=WARM, **how):
        return Scorer(model, tiny_tokenizer(), **how).samples(prompts, ("Z",), 6, sampling)

    ways = [samples(batch_tokens=n, share_prefixes=s) for n, s in ((1, True), (90, True), (9999, True), (200, False))]
    assert ways[0] == ways[1] == ways[2] == ways[3]
    assert all(len(texts) == 4 for texts in ways[0])
    assert ways[0][1] == ways[0][4]  # the same prompt, the same samples
    assert len({text for texts in ways[0] for text in texts}) > 8
    assert samples([PROMPTS[2]]) == [ways[0][2]]
    assert samples(sampling=SamplingConfig(2, 1.5, 0.9, seed=3)) == [texts[:2] for texts in ways[0]]
    assert samples(sampling=SamplingConfig(4, 1.5, 0.9, seed=4)) != ways[0]


def test_little_temperature_and_a_small_nucleus_are_greedy(model):
    scorer = Scorer(model, tiny_tokenizer())
    greedy = scorer.generate(PROMPTS, ("Z",), 6)
    for sampling in (GREEDY, SamplingConfig(1, 1e-4), SamplingConfig(1, 1.0, 1e-6)):
        assert [texts[0] for texts in scorer.samples(PROMPTS, ("Z",), 6, sampling)] == greedy


@pytest.mark.parametrize("top_p", [1.0, 0.75])
def test_tokens_are_drawn_by_their_probability(top_p):
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])
    draws = 20000
    sampling = SamplingConfig(1, 2.0, top_p)
    chances = torch.from_numpy(np.random.default_rng(0).random(draws))
    found = sampling.sample_tokens(logits.expand(draws, -1), chances)
    shares = torch.softmax(logits / 2, -1)
    if top_p < 1:  # 0.352, 0.274 and 0.214: the third passes 0.75
        kept = shares >= shares.sort(descending=True).values[2]
        shares = torch.where(kept, shares, 0)
        shares = shares / shares.sum()
    counts = torch.bincount(found, minlength=5) / draws
    assert (counts - shares).abs().max() < 0.012
    assert not counts[shares == 0].any()
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert shares[sampling.sample_tokens(logits.expand(2, -1), ends)].all()


def test_programs_are_sampled_and_other_answers_are_not(model):
    asked = {}

    def grade(document, answers):
        asked[document.id] = list(answers)
        found = {"pass@1": passed_at([len(a) % 2 == 0 for a in answers], 1)}
        return found | ({"pass@4": 1.0} if len(answers) == 4 else {})

    documents = [
        Document("t", "code", "k0", "code", "def f", until=("Z",), max_new_tokens=6),
        Document("w", "words", "k1", "generate", "def f", until=("Z",), max_new_tokens=6),
    ]
    graders = {
        "t": TaskGrader("t", "pass@1", grade),
        "w": TaskGrader("w", "length", lambda d, a: grade(d, a) | {"length": 1.0}),
    }
    evaluator = Evaluator(Scorer(model, tiny_tokenizer()), graders, sampling=WARM)
    program, words = evaluator.score(documents)
    assert (len(asked["code"]), len(asked["words"])) == (4, 1)
    assert program.also == (("pass@4", 1.0),)
    assert dict(words.also).keys() == {"pass@1"}
    row = summarise_scores([program], [program._replace(also=(("pass@4", 0.5),))], documents[:1])
    assert row["also"]["pass@4"]["score"] == 100.0
    assert row["also"]["pass@4"]["gain"]["mean"] == pytest.approx(50)
    assert "also" not in summarise_scores([words._replace(also=())], [words], documents[1:])


def test_targets_are_sampled_where_the_task_says_so(tmp_path):
    file = write_rows(tmp_path / "sums.jsonl", [{"prompt": f"{i}+1=", "target": f"{i + 1}\n"} for i in range(20)])
    task = make_task(f"sampled:{file}", DataSection(pass_at=10), tokenizer=tiny_tokenizer())
    document = task.reported()[0]
    assert (task.metric, document.kind, document.until) == ("pass@10", "generate", ("\n",))
    right = document.reference.strip()
    assert task.grade(document, [right] + ["no"] * 9) == {"pass@1": pytest.approx(0.1), "pass@10": 1.0}
    assert task.grade(document, [right + "0"] * 10) == {"pass@1": 0.0, "pass@10": 0.0}
    assert len(load_domain("d", [f"sampled:{file}"], tokenizer=tiny_tokenizer()).reference) == 10
    rows = [{"question": f"{i}?", "choices": ["a", "b"], "answer": 0} for i in range(9)]
    choices = write_rows(tmp_path / "choices.jsonl", rows)
    with pytest.raises(DataError, match="a prompt and its target"):
        make_task(f"sampled:{choices}")
    assert make_task("sampled:demo:code").reported()[0].until == ("\n",)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"samples": 10, "temperature": 0}, "temperature is 0"),
        ({"pass_at": 10, "temperature": 0}, "temperature is 0"),
        ({"samples": 5, "temperature": 0.8, "pass_at": 10}, "at least 10 are needed"),
        ({"temperature": 0.8, "top_p": 0}, "top_p"),
    ],
)
def test_a_recipe_that_cannot_be_sampled_is_refused(data, said):
    with pytest.raises(ValueError, match=said):
        EvalRecipe.model_validate({"artefact": "m", "domains": {"c": ["mbpp"]}, "data": data})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, SamplingConfig(1, 0.0, 0.95)),
        ({"pass_at": 10}, SamplingConfig(10, 0.8, 0.95)),
        ({"samples": 20, "temperature": 0.2, "top_p": 1}, SamplingConfig(20, 0.2, 1.0)),
        ({"temperature": 0.5}, SamplingConfig(1, 0.5, 0.95)),
    ],
)
def test_what_a_recipe_leaves_out(data, expected):
    recipe = EvalRecipe.model_validate({"artefact": "m", "domains": {"c": ["mbpp"]}, "data": data})
    assert sampling_of(recipe) == expected


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(temperature=0.8)])
def test_of_logits_that_are_nan_no_token_is_picked(sampling):
    logits = torch.zeros(2, 5)
    assert len(tokens_to_list(sampling.sample_tokens(logits, torch.zeros(2)))) == 2
    logits[1, 3] = float("nan")
    with pytest.raises(NumericError, match="next token's logits are NaN"):
        tokens_to_list(sampling.sample_tokens(logits, torch.zeros(2)))
