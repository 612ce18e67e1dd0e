"""lm-eval's model ``freemoe``: document by document what lm-eval's own backend says, under the right expert."""

import functools

import pytest
import torch

from freemoe.cli.lm_eval import command_line
from freemoe.core.errors import DataError, RecipeError, UnknownNameError
from tests.cli.conftest import freemoe  # noqa: F401  a fixture
from tests.lm_eval_files import write_task
from tests.tiny import tiny_model, tiny_tokenizer

# lm-eval and its libraries warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")

CONTEXT = 160
SHOTS = "12+5=17\n30+4=34\n"


def rows():
    return [
        {"q": f"{SHOTS}{i}+{3 * i}=", "choices": [f"{4 * i}", f"{4 * i}.", "none"], "answer": i % 3} for i in range(8)
    ]


CONFIGS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 9, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
}


def task_config(kind):
    """A choice or a generation over the same rows, or a perplexity over longer ones, made without files."""
    from datasets import Dataset

    long = [{"q": "".join(f"{i}+{n}={i + n}\n" for i in range(n))} for n in (2, 19, 31, 50)]
    held = Dataset.from_list(long if kind == "perplexity" else rows())
    return {"task": kind, "custom_dataset": lambda **_: {"test": held}, "test_split": "test", **CONFIGS[kind]}


@functools.cache
def manager():
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def samples(model, config, **options):
    """lm-eval's log of every document."""
    import lm_eval

    tasks = list(manager().load([config])["tasks"].values())
    result = lm_eval.simple_evaluate(
        model, tasks=tasks, task_manager=manager(), log_samples=True, bootstrap_iters=0, **options
    )
    (found,) = result["samples"].values()
    return found


def hflm(model):
    from lm_eval.models.huggingface import HFLM

    return HFLM(model, tokenizer=tiny_tokenizer(), batch_size=4, max_length=CONTEXT, softmax_dtype="float32")


def ours(**arguments):
    from freemoe.domain_experts.hosting.lm_eval_model import FreeMoELM

    return FreeMoELM(**{"max_length": CONTEXT, **arguments})


def values(sample):
    """A document's answers: flat numbers, or its text."""
    flat = [r[0] if isinstance(r, list | tuple) and len(r) == 1 else r for r in sample["resps"]]
    return [v for r in flat for v in (r if isinstance(r, list | tuple) else [r])]


@pytest.mark.parametrize("kind", ["choice", "generate", "perplexity"])
def test_every_document_as_lm_evals_own_backend(kind):
    model = tiny_model("llama")
    theirs = samples(hflm(model), task_config(kind))
    options = {"pretrained": model, "tokenizer": tiny_tokenizer(), "max_length": CONTEXT, "batch_tokens": 500}
    import freemoe.domain_experts.hosting.lm_eval_model  # noqa: F401  registers the name

    mine = samples("freemoe", task_config(kind), model_args=options)
    assert len(mine) == len(theirs) == (4 if kind == "perplexity" else 8)
    for a, b in zip(mine, theirs, strict=True):
        assert a["doc"] == b["doc"]
        assert a["arguments"] == b["arguments"]
        if kind == "generate":
            assert values(a) == values(b)
        else:
            assert values(a) == pytest.approx(values(b), abs=2e-4)
    if kind == "generate":
        assert len({values(a)[0] for a in mine}) > 1
    if kind == "perplexity":
        assert max(len(a["doc"]["q"]) for a in mine) > 2 * CONTEXT  # several windows


def asked(pairs, kind="loglikelihood"):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, pair, i) for i, pair in enumerate(pairs)]


def loglikelihoods(lm, pairs):
    return lm.loglikelihood(asked(pairs), disable_tqdm=True)


def numbers(lm, pairs, within):
    """What the log-likelihoods must come near to."""
    return pytest.approx([value for value, _ in loglikelihoods(lm, pairs)], abs=within)


PROMPTS = ["treaty judge claim 5?", "12+7*3=", "court appeal party 9?", "881+5*2=", "treaty judge claim 5?"]


def test_each_request_is_answered_by_the_expert_of_its_context(world, artefact, moe):
    pairs = [(p, a) for p in PROMPTS for a in (" yes", " no.")]
    lm = ours(pretrained=str(artefact), device="cpu")
    assert lm.expert == "auto"
    names = dict(zip(PROMPTS, (name for name, _ in moe.route(PROMPTS)), strict=True))
    assert len(set(names.values())) > 1
    for pair, (value, greedy) in zip(pairs, loglikelihoods(lm, pairs), strict=True):
        with moe.expert(names[pair[0]]):
            ((expected, other),) = loglikelihoods(hflm(moe.model), [pair])
        assert (value, greedy) == (pytest.approx(expected, abs=2e-4), other)
    assert lm.moe.active == "base"
    texts = lm.generate_until(asked([(p, {"until": ["\n"], "max_gen_toks": 5}) for p in PROMPTS], "generate_until"))
    whole = lm.loglikelihood_rolling(asked([(p,) for p in PROMPTS], "loglikelihood_rolling"))
    for i, prompt in enumerate(PROMPTS):
        with moe.expert(names[prompt]):
            rival = hflm(moe.model)
            assert rival.generate_until(asked([(prompt, {"until": ["\n"], "max_gen_toks": 5})]), True) == [texts[i]]
            (expected,) = rival.loglikelihood_rolling(asked([(prompt,)]), disable_tqdm=True)
        assert whole[i] == pytest.approx(expected, abs=2e-4)


def test_a_named_expert_answers_everything(world, artefact, moe):
    pairs = [(p, " yes") for p in PROMPTS]
    with moe.expert("law/1"):
        expected = numbers(hflm(moe.model), pairs, 2e-4)
    for given in ({"pretrained": str(world.base), "artefact": str(artefact), "device": "cpu"}, {"pretrained": moe}):
        found = [value for value, _ in loglikelihoods(ours(**given, expert="law/1"), pairs)]
        assert found == expected
    base = ours(pretrained=moe, expert="base")
    assert found != numbers(base, pairs, 1e-3)
    plain = ours(pretrained=str(world.base), device="cuda:0")  # what lm-eval's command asks for everywhere
    assert plain.expert == "base"
    if not torch.cuda.is_available():
        assert plain.device.type == "cpu"
    assert [value for value, _ in loglikelihoods(plain, pairs)] == numbers(base, pairs, 1e-5)


def test_a_request_without_context_gets_the_base(moe, monkeypatch):
    lm = ours(pretrained=moe, expert="auto")
    seen = []
    monkeypatch.setattr(moe, "route", lambda ids, mask=None: seen.append(ids) or [("law/0", None)])
    found = loglikelihoods(lm, [("", "alone"), ("12+7=", "19")])
    assert len(seen) == 1
    assert found[:1] == loglikelihoods(ours(pretrained=moe, expert="base"), [("", "alone")])


@pytest.mark.parametrize("setting", [{"do_sample": True}, {"temperature": 0.7}, {"num_beams": 4}])
def test_what_is_not_greedy_is_refused(setting):
    lm = ours(pretrained=tiny_model("llama"), tokenizer=tiny_tokenizer())
    with pytest.raises(RecipeError, match="decodes greedily"):
        lm.generate_until(asked([("a", {"until": ["\n"], **setting})], "generate_until"))


def test_bad_arguments(world, moe):
    with pytest.raises(RecipeError, match=r"no argument 'peft'; it has pretrained"):
        ours(pretrained=str(world.base), peft="x")
    with pytest.raises(RecipeError, match="plain model"):
        ours(pretrained=str(world.base), expert="law/0")
    with pytest.raises(UnknownNameError, match="law/0"):
        ours(pretrained=moe, expert="nobody")
    moe.router = None
    assert ours(pretrained=moe).expert == "base"
    with pytest.raises(RecipeError, match=r"no router; allowed: base, law/0"):
        ours(pretrained=moe, expert="auto")
    lm = ours(pretrained=moe, expert="base")
    with pytest.raises(DataError, match="no tokens of its own"):
        lm.loglikelihood(asked([("some", "")]))
    lm.tokenizer.bos_token = lm.tokenizer.eos_token = None
    with pytest.raises(DataError, match="neither a bos nor an eos"):
        lm.loglikelihood_rolling(asked([("some",)], "loglikelihood_rolling"))


def test_the_command(world, tmp_path, monkeypatch, freemoe):  # noqa: F811
    from lm_eval import tasks

    folder = write_task(tmp_path)
    # lm-eval's own tasks are not indexed.
    monkeypatch.setattr(tasks, "TaskManager", functools.partial(tasks.TaskManager, include_defaults=False))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    arguments = f"--model_args pretrained={world.base} --tasks sums --limit 2 --include_path {folder}"
    done = freemoe("lm-eval", *arguments.split()).ok()
    assert "freemoe (" in done.out
    assert "|sums|" in done.out.replace(" ", "")


def test_lm_evals_command_line_is_passed_on():
    assert command_line(["--tasks", "a"]) == ["--model", "freemoe", "--tasks", "a"]
    assert command_line(["run", "--tasks", "a"]) == ["run", "--model", "freemoe", "--tasks", "a"]
    assert command_line(["ls", "tasks"]) == ["ls", "tasks"]
    for named in (["--model", "hf"], ["--model=hf"]):
        assert command_line([*named, "--tasks", "a"]) == [*named, "--tasks", "a"]
