"""``lm_eval:NAME``: the answers and scores of lm-eval's own evaluation of the same YAML on the same model."""

import pytest

from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.evaluation import evaluate_target
from freemoe.evals.tasks.domains import make_task
from freemoe.models.checkpoints.loading import load_base
from freemoe.recipes import DataSection, EvalRecipe
from freemoe.results import read_result
from tests.evals.test_lm_eval_parity import arguments, same_choices
from tests.lm_eval_files import CHOICE, GENERATE, SIZES, TARGET, write_task

# lm-eval and its libraries warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")


def lm_eval_samples(folder, name, model, tokenizer, shots):
    """lm-eval's own evaluation of the task's YAML: its own index, its own reading of the files, its own loop."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    backend = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=128)
    manager = TaskManager(include_defaults=False, include_path=folder)
    how = {"num_fewshot": shots, "log_samples": True, "bootstrap_iters": 0}
    result = lm_eval.simple_evaluate(backend, tasks=[name], task_manager=manager, **how)
    (samples,) = result["samples"].values()
    return samples


@pytest.fixture(scope="module")
def demo():
    return load_base("freemoe-demo", dtype="float32")


@pytest.mark.parametrize(
    ("form", "kind", "shots", "draw"),
    [
        ("json", CHOICE, 0, "task"),
        ("parquet", CHOICE, 2, "task"),
        ("json", CHOICE, 2, "document"),
        ("csv", TARGET, 0, "task"),
    ],
    ids=["choice", "few-shot choice", "examples drawn for every document", "target"],
)
def test_answers_and_scores_are_lm_evals_own(form, kind, shots, draw, tmp_path, demo):
    # lm-eval draws few-shot examples anew for every document unless the task says not to.
    folder = write_task(tmp_path, form=form, **kind, fewshot_config={"sampler": "first_n"} if draw == "task" else None)
    samples = lm_eval_samples(folder, "sums", *demo, shots)
    data = DataSection(task_folder=str(folder), fewshot_draw=draw)
    task = make_task(f"lm_eval:sums@{shots}", data)
    documents = task.reported()
    assert len(documents) == len(samples) == SIZES["test"]
    # A part of the documents has the same prompts.
    part = make_task(f"lm_eval:sums@{shots}", data.model_copy(update={"limit": 6})).reported()
    assert [d.prompt for d in part] == [documents[d.index].prompt for d in part]
    scored = same_choices(task, documents, samples, Scorer(*demo, max_length=128))
    assert task.metric == "acc"
    assert 0 < sum(scored) < len(scored) or kind is TARGET
    assert "left out: no mean over documents" in task.note


@pytest.mark.parametrize(("metric", "other"), [("acc_norm", "acc"), ("acc", "acc_norm")])
def test_the_figure_is_the_metric_that_is_named_and_the_other_stands_beside_it(metric, other, tmp_path, demo):
    # Choices of different lengths, so that both accuracies differ.
    folder = write_task(tmp_path, **CHOICE | {"doc_to_choice": "{{[first, second ~ '\\n12+1=13\\n', third]}}"})
    samples = lm_eval_samples(folder, "sums", *demo, 0)
    theirs = {name: 100 * sum(s[name] for s in samples) / len(samples) for name in (metric, other)}
    recipe = EvalRecipe(
        artefact="freemoe-demo",
        domains={"d": (f"lm_eval:sums@0:{metric}",)},
        output=str(tmp_path / "result.json"),
        dtype="float32",
        data=DataSection(task_folder=str(folder)),
    )
    evaluate_target(recipe)
    (domain,) = read_result(tmp_path / "result.json").domains
    row = domain.rows["base"]
    assert theirs[metric] != theirs[other]
    assert (row.score, row.also[other].score) == pytest.approx((theirs[metric], theirs[other]))
    assert list(row.also) == [other]
    assert domain.documents[0]["id"].startswith(f"sums@0:{metric}/")
    assert domain.notes[0].startswith(f"sums@0:{metric}: ")


def test_generations_and_scores_are_lm_evals_own(tmp_path, demo):
    folder = write_task(tmp_path, **GENERATE)
    samples = lm_eval_samples(folder, "sums", *demo, 0)
    task = make_task("lm_eval:sums", DataSection(task_folder=str(folder)))
    scorer = Scorer(*demo, max_length=128)
    right = 0
    for document in task.reported():
        logged = {s["filter"]: s for s in samples if arguments(s)[0][0] == document.prompt}
        assert document.until == ("\n", " ")
        assert document.max_new_tokens == 5
        (text,) = scorer.generate([document.prompt], document.until, document.max_new_tokens)
        assert logged["whole"]["resps"] == [[text]]
        # The first filter's figure is the reported one.
        figures = {"exact_match": logged["whole"]["exact_match"], "exact_match,digits": logged["digits"]["exact_match"]}
        assert task.grade(document, [text]) == figures
        assert task.grade(document, [document.reference]) == {"exact_match": 1.0, "exact_match,digits": 1.0}
        right += figures["exact_match"]
    assert task.metric == "exact_match"
    assert right < len(task.reported())
