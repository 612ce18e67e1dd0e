"""``lm_eval:NAME``: the rule of the splits, and what is refused with its reason."""

from pathlib import Path

import pytest
import yaml

from freemoe.core.errors import DataError, RecipeError, UnknownNameError
from freemoe.evals.tasks.documents import FrozenChoice
from freemoe.evals.tasks.domains import load_domain, make_task
from freemoe.recipes import DataSection
from tests.lm_eval_files import GENERATE, SIZES, rows, write_files, write_task
from tests.rows import write_rows

# lm-eval and its libraries warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")

CARVED = "carved from test by content key, one half each"


def task_of(folder, spec="sums", **data):
    return make_task(f"lm_eval:{spec}", DataSection(task_folder=str(folder), **data))


@pytest.mark.parametrize(
    ("spec", "changes", "told", "sizes"),
    [
        ("sums", {}, "reference validation, reported test", (24, 20)),
        ("sums", {"test_split": None}, "reference train, reported validation", (30, 24)),
        ("sums", {"validation_split": None}, "reference train, reported test", (30, 20)),
        ("sums", {"validation_split": "test"}, "reference train, reported test", (30, 20)),
        ("sums+train", {}, "reference validation+train, reported test", (54, 20)),
        ("sums+carve", {}, CARVED, (10, 10)),
        ("sums+carve", {"training_split": None, "validation_split": None}, CARVED, (10, 10)),
    ],
)
def test_the_rule_of_the_splits(spec, changes, told, sizes, tmp_path):
    folder = write_task(tmp_path, **changes)
    domain = load_domain("d", [f"lm_eval:{spec}"], DataSection(task_folder=str(folder)))
    assert f"{told}; reference {sizes[0]} of {sizes[0]}; reported {sizes[1]} of {sizes[1]}" in domain.notes[0]
    assert (len(domain.reference), len(domain.reported)) == sizes
    reported = domain.reported.open(FrozenChoice("a test"))
    assert not {d.key for d in domain.reference.documents} & {d.key for d in reported}


def test_copies_stand_on_one_side_only(tmp_path):
    splits = {s: rows(s) for s in SIZES}
    splits["validation"][3] = {**splits["test"][0], "q": splits["test"][0]["q"].upper() + "  "}
    task = task_of(write_task(tmp_path, files=write_files(tmp_path, splits=splits)))
    assert len(task.reference()) == SIZES["validation"] - 1
    assert "1 reference documents dropped as also reported" in task.note
    files = write_files(tmp_path, splits={"test": rows("test") * 2})
    carved = task_of(write_task(tmp_path, files=files, training_split=None, validation_split=None), "sums+carve")
    sides = [{d.key for d in side} for side in (carved.reference(), carved.reported())]
    assert len(sides[0]) == len(sides[1]) == 10
    assert not sides[0] & sides[1]


def test_few_shot_examples_are_never_reported_ones(tmp_path):
    task = task_of(write_task(tmp_path, training_split=None, fewshot_split="test"), "sums@2", limit=5)
    assert "2-shot from a tenth of the reference, kept apart" in task.note
    assert "reported 5 of 20" in task.note
    first = task.reported()[0]
    shots = first.prompt.removesuffix(rows("test")[first.index]["q"])
    assert shots.count("+5=") == 2
    assert all(d.prompt.startswith(shots) for d in [*task.reference(), *task.reported()])
    assert not any(row["q"] in shots for row in rows("test"))
    # The YAML's own number of examples, unless --fewshot or @N says otherwise.
    folder = write_task(tmp_path, num_fewshot=1)
    assert "1-shot" in task_of(folder).note
    assert "2-shot from train" in task_of(folder, fewshot=2).note
    assert "0-shot" in task_of(folder, "sums@0", fewshot=2).note


def test_functions_beside_the_yaml(tmp_path):
    folder = Path(write_task(tmp_path))
    (folder / "ours.py").write_text(
        "def some(docs):\n    return docs.filter(lambda row: row['gold'] != 1)\n"
        "def results(doc, results):\n    return {'sure': float(results[doc['gold']][0] > -3), 'pair': (1, 2)}\n"
    )
    config = yaml.safe_load((folder / "sums.yaml").read_text())
    config["metric_list"] = [{"metric": "sure", "aggregation": "mean", "higher_is_better": True}]
    text = yaml.safe_dump(config) + "process_docs: !function ours.some\nprocess_results: !function ours.results\n"
    (folder / "sums.yaml").write_text(text)
    task = task_of(folder)
    assert [d.gold for d in task.reported()] == [row["gold"] for row in rows("test") if row["gold"] != 1]
    document = task.reported()[0]
    assert task.metric == "sure"
    assert task.grade(document, [(-2.0, False)] * 3) == {"sure": 1.0}
    assert task.grade(document, [(-4.0, False)] * 3) == {"sure": 0.0}


def metric(name):
    return {"metric_list": [{"metric": name, "aggregation": name, "higher_is_better": name == "f1"}]}


REFUSED = {
    "one split": ({"training_split": None, "validation_split": None}, r"one split only \(test\).*sums\+carve"),
    "no split": ({"validation_split": None, "test_split": None}, "names neither a test nor a validation split"),
    "a split that is not there": ({"test_split": "tset"}, "no split 'tset', but .*validation"),
    "no training split to add": ({"training_split": None, "spec": "sums+train"}, "no training split beside"),
    "whole texts": ({"output_type": "loglikelihood_rolling"}, "text:FILE"),
    "unknown output": ({"output_type": "draw"}, "output_type is 'draw'; taken are multiple_choice"),
    "code": ({"unsafe_code": True}, "runs generated programs.*--allow-code-execution"),
    "pictures": ({"doc_to_image": "picture"}, "pictures or sound"),
    "several answers": ({**GENERATE, "repeats": 4}, "generates 4 answers"),
    "sampled answers": ({**GENERATE, "generation_kwargs": {"do_sample": True}}, "it samples its answers"),
    "no mean": (metric("f1"), "no metric that is a mean over documents.*lm-eval has f1"),
    "less is better": (metric("brier_score"), "no metric that is a mean over documents"),
    "different prompts": ({"doc_to_text": "{{gold}}", "doc_to_target": "q"}, "its choices are different prompts"),
    "a missing column": ({"doc_to_choice": "{{[first, fourth.x]}}"}, "cannot render its first document.*fourth"),
    "no right answer": (
        {"doc_to_target": "{{gold if gold < 2 else 7}}"},
        "right answer 7, but lm-eval makes 3 choices",
    ),
    "too many examples": ({"spec": "sums@31"}, "31 few-shot examples asked for, 30 there"),
    "no file": ({"dataset_kwargs": {"data_files": "none.json"}}, "the files that its YAML names.*none.json"),
    "no network": ({"dataset_path": "some/where", "dataset_kwargs": None}, "some/where from the hub.*Without"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, tmp_path):
    changes, said = REFUSED[case]
    folder = write_task(tmp_path, **{name: value for name, value in changes.items() if name != "spec"})
    with pytest.raises(DataError, match=r"(?s)sums.*" + said):
        task_of(folder, changes.get("spec", "sums"))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("lm_eval:", "names no task"),
        ("lm_eval:sums+half", r"\+carve .*or \+train"),
        ("lm_eval:sums+carve+train", "one of them"),
    ],
)
def test_bad_specs(spec, said):
    with pytest.raises(RecipeError, match=said):
        make_task(spec)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("broken", "metric_list: [", r"broken\.yaml cannot be read as a task of lm-eval \(ParserError"),
        (
            "absent",
            "test_split: t\nvalidation_split: v\ndoc_to_text: !function no.f",
            "functions that cannot be loaded",
        ),
        ("sums", None, r"No folder at .*nowhere \(--task-folder\)"),
    ],
)
def test_yaml_that_cannot_be_used(name, text, said, tmp_path):
    folder = tmp_path / "nowhere"
    if text:
        write_rows(folder / f"{name}.yaml", [f"task: {name}", text])
    with pytest.raises(DataError, match=said):
        task_of(folder, name)


def test_unknown_names_have_near_misses(tmp_path, monkeypatch):
    monkeypatch.setattr("freemoe.compat.lm_eval._whole_index", lambda: dict.fromkeys(map(str, range(999))))
    said = r"'my_own_sum'\. Did you mean 'my_own_sums'.*names\. .*lm-eval ls tasks"
    with pytest.raises(UnknownNameError, match=said):
        task_of(write_task(tmp_path, name="my_own_sums"), "my_own_sum")


def test_groups_name_their_members(tmp_path):
    folder = write_task(tmp_path, tag=["ours"])
    (Path(folder) / "group.yaml").write_text(
        "group: both\ntask:\n  - sums\n  - group: inner\n    task: [ours, other]\n"
    )
    for name, said in (
        ("mmlu", r"group of 57 tasks of lm-eval \(mmlu_abstract_algebra, .*\.\.\.\)\. Name its tasks"),
        ("both", r"both is a group of 2 tasks of lm-eval \(sums, other\)"),
        ("ours", r"ours is a group of 1 tasks of lm-eval \(sums\)"),
        ("squadv2", "squadv2 is written in Python"),
    ):
        with pytest.raises(DataError, match=said):
            task_of(folder, name)


def test_a_task_of_the_users_stands_before_lm_evals_whose_data_offline_are_refused_at_once(tmp_path):
    with pytest.raises(DataError, match=r"the data set allenai/sciq from the hub could not be read .*--task-folder"):
        make_task("lm_eval:sciq")
    assert "reported 20 of 20" in task_of(write_task(tmp_path, name="sciq"), "sciq").note
