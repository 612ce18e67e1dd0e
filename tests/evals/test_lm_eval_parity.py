"""The same answers, document by document, as lm-eval's own evaluation of them on the same model."""

import contextlib
import dataclasses
import subprocess
import sys

import pytest

from freemoe.compat.lm_eval import CODE_MODULES, official_config
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.domains import make_task
from freemoe.recipes import DataSection
from tests.sandbox import needs_bubblewrap

pytestmark = [
    pytest.mark.realdata,
    # lm-eval and its libraries warn of their own affairs.
    pytest.mark.filterwarnings("ignore"),
]


def lm_eval_samples(config, rows, shots, lm, **overrides):
    """Evaluate ``rows`` by lm-eval alone: its YAML, its prompts, its loop; return its log of every document."""
    import lm_eval
    from datasets import Dataset
    from lm_eval.tasks import TaskManager

    splits = {"test": Dataset.from_list(rows)}
    if shots:
        splits["shots"] = Dataset.from_list(shots)
        overrides["fewshot_split"] = "shots"
    data = {"custom_dataset": lambda **_: splits, "test_split": "test", "validation_split": None}
    config = {**config, **data, **overrides}
    if config.get("training_split"):
        config["training_split"] = None
    if not shots and "fewshot_split" in config:
        config["fewshot_split"] = "test"
    config.pop("tag", None)
    manager = TaskManager(include_defaults=False)
    task = manager.load([config])["tasks"]
    task = next(iter(task.values())) if isinstance(task, dict) else task[0]
    how = {"log_samples": True, "bootstrap_iters": 0, "confirm_run_unsafe_code": True}
    result = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, **how)
    (samples,) = result["samples"].values()
    return samples


def hflm(stories, **kwargs):
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = stories
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=512, **kwargs)


def rows_of(task, documents):
    return [dict(task._rows[d.id][1]) for d in documents]


@pytest.mark.parametrize("name", ["arc_easy", "mmlu_anatomy", "mathqa", "openbookqa", "rte"])
def test_choice(name, stories, data_root):
    task = make_task(name, DataSection(root=str(data_root), limit=12))
    documents = task.reported()
    row = task.row
    part = task._parts[0]
    config = official_config(row.yaml.format(subject=part.subject))
    shots = [r for _, r in part.rows["shots"]]
    samples = lm_eval_samples(config, rows_of(task, documents), shots, hflm(stories), num_fewshot=row.num_fewshot)
    assert len(documents) == 12
    right = same_choices(task, documents, samples, Scorer(*stories, max_length=512))
    assert 0 < sum(right) < 12  # neither all nor none: the comparison says something


def arguments(sample):
    """The requests of a document as lm-eval logs them."""
    logged = sample["arguments"]
    return [tuple(a) for a in (logged.values() if isinstance(logged, dict) else logged)]


def same_choices(task, documents, samples, scorer, tolerance=1e-4):
    """Check that requests, likelihoods and grades are those that lm-eval logged; return how each document was graded."""
    right = []
    for document, sample in zip(documents, samples, strict=True):
        contexts = document.contexts or (document.prompt,) * len(document.answers)
        assert arguments(sample) == list(zip(contexts, document.answers, strict=True))
        ours = [(s.loglikelihood, s.is_greedy) for s in scorer.score(scorer.document_pairs(document))]
        theirs = [r[0] if isinstance(r[0], list | tuple) else r for r in sample["resps"]]
        for (mine, greedy), (their, their_greedy) in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(their, abs=tolerance)
            assert greedy == their_greedy
        grade = task.grade(document, ours)
        assert grade == pytest.approx({name: sample[name] for name in grade}, abs=1e-4)
        right.append(grade["acc"])
    return right


def test_generation(stories, data_root):
    task = make_task("gsm8k@2", DataSection(root=str(data_root), limit=5))
    documents = [dataclasses.replace(d, max_new_tokens=24) for d in task.reported()]
    config = official_config("gsm8k/gsm8k.yaml")
    config["generation_kwargs"] = {**config["generation_kwargs"], "max_gen_toks": 24}
    config["fewshot_config"] = {"sampler": "first_n"}
    shots = [r for _, r in task._parts[0].rows["shots"]][:2]
    samples = lm_eval_samples(config, rows_of(task, documents), shots, hflm(stories), num_fewshot=2)
    scorer = Scorer(*stories, max_length=512)
    answers = scorer.generate([d.prompt for d in documents], documents[0].until, 24)
    for document, answer in zip(documents, answers, strict=True):
        logged = [s for s in samples if s["doc"]["question"] in document.prompt.rpartition("Question: ")[2]]
        assert {s["filter"] for s in logged} == {"strict-match", "flexible-extract"}
        assert logged[0]["resps"] == [[answer]]
        assert arguments(logged[0])[0][0] == document.prompt
        _same_exact_match(task.grade(document, [answer]), logged)


def _same_exact_match(grade, logged):
    theirs = {s["filter"]: s["exact_match"] for s in logged}
    assert grade == {"exact_match": theirs["flexible-extract"], "exact_match,strict-match": theirs["strict-match"]}


def answering(answers):
    """A model of lm-eval's that says what it is told, by prompt."""
    from lm_eval.api.model import LM

    class Told(LM):
        def generate_until(self, requests, disable_tqdm=False):
            return [answers[r.args[0]] for r in requests]

        def loglikelihood(self, requests, disable_tqdm=False):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    return Told()


def test_generation_of_right_and_odd_answers(data_root):
    task = make_task("gsm8k", DataSection(root=str(data_root), limit=12))
    documents = task.reported()
    odd = ["", "no number", "It is $1,000.00.", "-5", "#### 7 and 8", "####", "3.", ".5 5"]
    texts = [d.reference if i < 4 else odd[i - 4] for i, d in enumerate(documents)]
    answers = dict(zip([d.prompt for d in documents], texts, strict=True))
    config = official_config("gsm8k/gsm8k.yaml")
    samples = lm_eval_samples(config, rows_of(task, documents), [], answering(answers), num_fewshot=0)
    for document, text in zip(documents, texts, strict=True):
        logged = [s for s in samples if arguments(s)[0][0] == document.prompt]
        _same_exact_match(task.grade(document, [text]), logged)


@pytest.fixture
def their_code_eval(monkeypatch):
    """A plain ``code_eval`` in the place of the one that lm-eval's own functions fetch and run."""

    def passes(program):
        with contextlib.suppress(subprocess.TimeoutExpired):
            how = {"capture_output": True, "timeout": 10, "stdin": subprocess.DEVNULL}
            return subprocess.run([sys.executable, "-c", program], **how).returncode == 0
        return False

    class CodeEval:
        def compute(self, references, predictions, k=(1,), **_):
            passed = [passes(f"{p[0]}\n{r}") for p, r in zip(predictions, references, strict=True)]
            return {"pass@1": sum(passed) / len(passed)}, {}

    monkeypatch.setattr("evaluate.load", lambda *_, **__: CodeEval())
    for name in CODE_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in CODE_MODULES:
        sys.modules.pop(name, None)


@needs_bubblewrap
@pytest.mark.parametrize("name", ["mbpp", "humaneval"])
def test_code(name, their_code_eval, stories, data_root):
    task = make_task(name, DataSection(root=str(data_root), limit=9, allow_code_execution=True))
    documents = task.reported()
    config = official_config(f"{name}/{name}.yaml")  # with their metric
    texts = [d.reference for d in documents]
    if name == "mbpp":
        texts = [t.removesuffix("\n[DONE]") for t in texts]
    texts[1] = texts[1].replace("return", "return not", 1)
    texts[2] = "    this is no Python"
    texts[3] = texts[3] + "\nraise ValueError('at the end')\n"
    answers = dict(zip([d.prompt for d in documents], texts, strict=True))
    samples = lm_eval_samples(config, rows_of(task, documents), [], answering(answers), num_fewshot=0)
    theirs = [s.get("pass@1", s.get("pass_at_1")) for s in samples]
    assert [task.grade(d, [t])["pass@1"] for d, t in zip(documents, texts, strict=True)] == theirs
    assert theirs[2] == theirs[3] == 0
    assert sum(theirs) >= 5
