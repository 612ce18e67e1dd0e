import gzip
import json

import pytest

from freemoe.compat.lm_eval import official_config
from freemoe.core.errors import DataError, RecipeError, SandboxError
from freemoe.evals.sandbox.code_metric import SandboxedCodeEval, sandboxed_code_eval
from freemoe.evals.tasks import benchmark_files as files
from freemoe.evals.tasks.benchmark import TaskName
from freemoe.evals.tasks.benchmarks import BENCHMARKS, MMLU_SUBJECTS, TABLE, find_benchmark
from freemoe.evals.tasks.documents import FrozenChoice
from freemoe.evals.tasks.domains import is_file_spec, load_domain, make_task
from freemoe.evals.tasks.splits import carve_by_key, draw_balanced
from freemoe.recipes import DataSection
from tests.rows import write_rows
from tests.sandbox import needs_bubblewrap

NAMES = [row.name for row in TABLE]


@pytest.mark.parametrize("row", TABLE, ids=NAMES)
def test_rows_name_two_splits_and_their_files(row):
    for sources in (row.local, row.hub or row.local):
        assert sources.reported
        assert sources.reference_splits or row.lender
        # One source for both splits is only ever carved.
        assert sources.is_carved == (sources.reported in sources.reference_splits)
        if sources.is_carved:
            assert "carved" in row.split_note
    for split in row.local.required_splits(shots=True):
        assert split in row.paths
    if row.lender:
        assert BENCHMARKS[row.lender].kind == row.kind


@pytest.mark.parametrize("row", [r for r in TABLE if r.yaml], ids=[r.name for r in TABLE if r.yaml])
def test_rows_agree_with_lm_evals_yaml(row):
    with sandboxed_code_eval(SandboxedCodeEval()):
        config = official_config(row.yaml.format(subject=row.subjects[0] if row.subjects else ""))
    kinds = {"multiple_choice": ("choice",), "generate_until": ("generate", "code")}
    assert row.kind in kinds[config["output_type"]]
    metrics = [m["metric"] if isinstance(m["metric"], str) else m["metric"].__name__ for m in config["metric_list"]]
    assert (row.scored or row.metric) in metrics or metrics == ["pass_at_k"]
    if row.filter:
        assert row.filter in [f["name"] for f in config["filter_list"]]
    # What lm-eval reports on is what we report on, but for what is carved from it.
    assert (row.hub or row.local).reported == (config.get("test_split") or config.get("validation_split"))


@pytest.mark.parametrize(
    ("spec", "name", "splits", "shots", "metric", "label"),
    [
        ("mmlu", "mmlu", (), None, "", "mmlu"),
        ("mmlu_virology@0", "mmlu_virology", (), 0, "", "mmlu_virology"),
        ("mbpp+train@3", "mbpp", ("train",), 3, "", "mbpp"),
        ("arc_challenge@25:acc_norm", "arc_challenge", (), 25, "acc_norm", "arc_challenge@25:acc_norm"),
        ("humaneval+train:pass@10", "humaneval", ("train",), None, "pass@10", "humaneval+train:pass@10"),
        ("lm_eval:sums+carve@2:acc_norm", "sums", ("carve",), 2, "acc_norm", "sums+carve@2:acc_norm"),
    ],
)
def test_names_of_tasks(spec, name, splits, shots, metric, label):
    task = TaskName.parse(spec)
    assert (task.name, task.splits, task.shots, task.metric, task.label) == (name, splits, shots, metric, label)
    assert not is_file_spec(spec)
    if not spec.startswith("lm_eval:"):
        row, subjects = find_benchmark(task)
        assert name in (row.name, f"{row.name}_{subjects[0] if subjects else ''}")


def test_carve_and_draw():
    keys = [str(i // 2) for i in range(100)]
    one, two = carve_by_key(keys, 0.5, 0)
    assert sorted(one + two) == list(range(100))
    assert not {keys[i] for i in one} & {keys[i] for i in two}
    assert len(one) == 50
    assert draw_balanced(list("abcdef"), [""] * 6, None) == list(range(6))
    few, more = (draw_balanced([str(i) for i in range(90)], ["x"] * 80 + ["y"] * 10, n, 1) for n in (8, 20))
    assert few == sorted(few)
    assert sum(i >= 80 for i in few) == 4
    # A longer draw holds the shorter one.
    assert set(few) < set(more)


# ---------------------------------------------------------------- made-up files in the original formats


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """A data root with a few documents of several benchmarks."""
    root = tmp_path_factory.mktemp("data")
    write_rows(root / "gsm8k/train.jsonl", [{"question": f"train {i}?", "answer": f"so\n#### {i}"} for i in range(30)])
    test = [{"question": f"test {i}?", "answer": f"so\n#### {i}"} for i in range(9)]
    write_rows(root / "gsm8k/test.jsonl", [*test, {"question": "TRAIN 3?", "answer": "#### 3"}])
    for subject in MMLU_SUBJECTS:
        for part, count in (("dev", 5), ("val", 3), ("test", 4)):
            rows = [f'"{subject}, {part} {i}?",w,x,y,z,{"ABCD"[i % 4]}' for i in range(count)]
            write_rows(root / f"mmlu/{part}/{subject}_{part}.csv", rows)
    rte = [{"sentence1": f"p{i // 2}", "sentence2": f"h{i}", "label": i % 2} for i in range(40)]
    write_rows(root / "rte/dev.jsonl", rte)
    mbpp = (1, 2, 11, 12, 300, 510, 511, 512, 600, 601, 974)
    rows = [{"task_id": i, "text": f"task {i}", "code": f"def f():\r\n    return {i}",
             "test_list": [f"assert f() == {i}"] * 3} for i in mbpp]  # fmt: skip
    write_rows(root / "mbpp/mbpp.jsonl", rows)
    human = {"task_id": "HumanEval/0", "prompt": "def g(x):\n", "canonical_solution": "    return x\n",
             "test": "def check(candidate):\n    assert candidate(1) == 1\n", "entry_point": "g"}  # fmt: skip
    (root / "humaneval").mkdir()
    (root / "humaneval/HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(human).encode()))
    return root


def test_gsm8k_carves_shots_from_train_and_drops_what_is_reported(made_up):
    task = make_task("gsm8k@2", DataSection(root=str(made_up)))
    reference, reported = task.reference(), task.reported()
    assert (len(reference), len(reported)) == (26, 10)
    first = reference[0].prompt
    shots = first[: first.rindex("Question: ")]
    assert shots.count("Question: train") == 2
    assert all(d.prompt.startswith(shots) for d in [*reference, *reported])
    own = {d.prompt.rpartition("Question: ")[2].partition("\n")[0] for d in reference}
    assert not any(question in shots for question in own)
    assert "TRAIN 3?" not in {q.upper() for q in own}
    assert "1 reference documents dropped" in task.note
    assert reference[0].reference.startswith(" so\n#### ")


def test_gsm8k_grades_by_both_filters_and_reports_the_flexible_one(made_up):
    task = make_task("gsm8k", DataSection(root=str(made_up)))
    document = task.reported()[4]
    assert task.metric == "exact_match"
    assert task.grade(document, ["It is 7, so 4."]) == {"exact_match": 1.0, "exact_match,strict-match": 0.0}
    assert task.grade(document, ["#### 4"]) == {"exact_match": 1.0, "exact_match,strict-match": 1.0}
    assert task.grade(document, ["#### 4", "5"])["exact_match"] == 0.5


def test_mmlu_is_balanced_over_subjects(made_up):
    task = make_task("mmlu", DataSection(root=str(made_up), limit=114))
    assert sorted(d.field for d in task.reported()) == sorted(MMLU_SUBJECTS * 2)
    document = task.reference()[0]
    assert document.answers == (" A", " B", " C", " D")
    assert document.prompt.count("\nAnswer: ") == 5
    assert task.grade(document, [(float(i == document.gold), True) for i in range(4)]) == {"acc": 1.0}


def test_rte_keeps_a_premise_on_one_side(made_up):
    domain = load_domain("d", ["rte"], DataSection(root=str(made_up)))
    assert len(domain.reference) == len(domain.reported) == 20
    assert "carved from validation" in domain.notes[0]


@needs_bubblewrap
def test_mbpp_ids_and_the_loan_to_humaneval(made_up):
    domain = load_domain("code", ["humaneval", "mbpp"], DataSection(root=str(made_up), allow_code_execution=True))
    documents = domain.reference.documents
    assert [d.prompt.split("task: ")[1][:8] for d in documents] == ["task 511", "task 512", "task 600"]
    assert {d.task for d in documents} == {"mbpp"}
    assert "borrowed from mbpp" in domain.notes[0]
    assert domain.graders["mbpp"].grade(documents[0], ["def f():\n    return 511"]) == {"pass@1": 1.0}
    alone = load_domain("code", ["humaneval+train"], DataSection(root=str(made_up), allow_code_execution=True))
    assert len(alone.reference) == 5
    human = alone.graders["humaneval"]
    (document,) = alone.reported.open(FrozenChoice("a test"))
    assert human.grade(document, ["    return x\n"]) == {"pass@1": 1.0}
    found = human.grade(document, ["    return 2\n"] * 8 + ["    return x\n"] * 2)
    assert found == {"pass@1": pytest.approx(0.2), "pass@10": 1.0}
    assert human.grade(alone.reference.documents[0], ["def f(): return 0"]) == {"pass@1": 0.0}


def test_code_needs_permission(made_up):
    task = make_task("humaneval", DataSection(root=str(made_up)))
    with pytest.raises(SandboxError, match="--allow-code-execution"):
        task.grade(task.reported()[0], ["    return x"])


def test_a_document_of_another_object_is_refused(made_up):
    rte, gsm8k = (make_task(name, DataSection(root=str(made_up))) for name in ("rte", "gsm8k"))
    with pytest.raises(DataError, match="has no document"):
        rte.grade(gsm8k.reported()[0], ["4"])


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("gsm8k@30", DataError, "few-shot examples asked for, 3 there. Write gsm8k@3"),
        ("mmlu@6", DataError, "few-shot examples asked for, 5 there. Write mmlu@5"),
        ("mbpp@4", DataError, "few-shot examples asked for, 3 there. Write mbpp@3"),
        ("humaneval@1", DataError, "few-shot examples asked for, 0 there. Write humaneval@0"),
        ("mmlu_virology:acc_norm", RecipeError, "mmlu_virology has no metric 'acc_norm', but acc"),
        ("gsm8k@2:acc", RecipeError, "gsm8k has no metric 'acc', but exact_match"),
        ("rte:acc@5", RecipeError, "rte has no metric 'acc@5', but acc. A name is NAME@SHOTS:METRIC"),
        ("mbpp:pass@100", RecipeError, "mbpp has no metric 'pass@100', but pass@1, pass@10"),
    ],
)
def test_shots_and_metrics_that_the_task_does_not_have(made_up, spec, error, said):
    with pytest.raises(error, match=said):
        make_task(spec, DataSection(root=str(made_up), samples=10))


def test_a_lender_reports_the_metric_of_the_borrower(made_up):
    data = DataSection(root=str(made_up), samples=10, allow_code_execution=True)
    graders = load_domain("d", ["humaneval+train:pass@10"], data).graders
    assert set(graders) == {"humaneval+train:pass@10", "mbpp+train:pass@10"}
    assert {grader.metric for grader in graders.values()} == {"pass@10"}


def test_which_examples_were_shown_is_on_record(made_up):
    def shots(spec, seed=0):
        (part,) = make_task(spec, DataSection(root=str(made_up)), seed=seed)._parts
        return part.subject, [name for name, _ in part.rows["shots"][: part.shots]]

    assert shots("mmlu_virology@2") == ("virology", ["dev:0", "dev:1"])
    assert shots("gsm8k@2") != shots("gsm8k@2", seed=1)


def test_a_benchmarks_name_wins_over_a_folder_of_that_name(made_up, monkeypatch):
    monkeypatch.chdir(made_up)
    assert len(make_task("rte", DataSection(root=".")).reported()) == 20


def test_a_letter_out_of_turn_is_part_of_the_choice_before_it(tmp_path):
    path = tmp_path / "train.tsv"
    head = "ID\tQuestion Stem\tChoices\tAnswer Key\n"
    path.write_text(head + "1\tStem\t(A) one (B) two (C) three (D) four (D) more\tB\n")
    (row,) = files.openbookqa_tsv(path)
    assert row["choices"] == {"text": ["one", "two", "three", "four (D) more"], "label": ["A", "B", "C", "D"]}
    path.write_text(head + "1\tStem\t(A) one (B) two (D) four\tB\n")
    with pytest.raises(DataError, match="A to D"):
        files.openbookqa_tsv(path)


@pytest.mark.parametrize(
    ("read", "name", "content", "said"),
    [
        (files.mmlu_csv, "a.csv", "a,b\n", "row 1: 2 cells"),
        (files.jsonl_gz_reader("a"), "a.gz", "a,b\n", "no gzipped JSONL"),
        (files.rows_reader("a"), "a.json", "a,b\n", "not JSON"),
        (files.openbookqa_tsv, "a.tsv", "a,b\n", "OpenBookQA's has"),
        (files.rows_reader("a"), "a.jsonl", '{"b": 1}\n', "a.jsonl:1: missing 'a'"),
        (files.rows_reader("a"), "a.json", "[5]", "row 1: missing 'a'"),
    ],
)
def test_malformed_files(read, name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        read(tmp_path / name)


# ---------------------------------------------------------------- the hub


def test_hub_offline_says_data_root():
    said = r"could not be read from the hub\. .*HF_HUB_OFFLINE is set.*--data-root FOLDER"
    with pytest.raises(DataError, match=said):
        make_task("openbookqa")


def test_hub_rows_go_through_lm_evals_own_cleaning(monkeypatch):
    import datasets

    asked = []

    def load_dataset(path, name=None, split=None):
        asked.append((path, name, split))
        row = {"activity_label": "Tea", "ctx_b": "and he", "endings": [f"drinks {k}" for k in range(4)]}
        own = [{"ctx_a": f"{split} {i} [title] pours", "ctx": f"{split} {i}", "label": str(i % 4)} for i in range(6)]
        return datasets.Dataset.from_list([row | more for more in own])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = make_task("hellaswag")
    assert asked == [("Rowan/hellaswag", None, "train"), ("Rowan/hellaswag", None, "validation")]
    assert task.reported()[1].prompt == "Tea: validation 1. pours And he"
    assert [d.gold for d in task.reference()] == [0, 1, 2, 3, 0, 1]
    assert "reference train, reported validation" in task.note


# ---------------------------------------------------------------- the real files

SIZES = {
    "mmlu": (1500, 14042),
    "gsm8k": (7473, 1319),
    "mathqa": (4475, 2985),
    "humaneval": (90, 164),
    "mbpp": (90, 500),
    "arc_easy": (570, 2376),
    "arc_challenge": (299, 1172),
    "hellaswag": (500, 500),
    "openbookqa": (500, 500),
    "rte": (137, 140),
    "wikitext": (600, 300),
}


@pytest.mark.realdata
@pytest.mark.parametrize("name", SIZES)
def test_real_files(name, data_root, stories):
    limit = {"wikitext": None, "mmlu": 57, "humaneval": None}.get(name, 60)
    data, how = DataSection(root=str(data_root), limit=limit, allow_code_execution=True), {"tokenizer": stories[1]}
    if name in ("wikitext", "humaneval"):
        domain = load_domain("d", [name], data, **how)
        reference, reported = domain.reference.documents, domain.reported.open(FrozenChoice("a test"))
    else:
        task = make_task(name, data, **how)
        reference, reported = task.reference(), task.reported()
        # Every row of the files, not only those drawn: sizes, and no content on both sides.
        both = ("reference", "reported")
        assert tuple(sum(len(p.rows[r]) for p in task._parts) for r in both) == SIZES[name]
        keys = [{p.row_content_key(row) for p in task._parts for _, row in p.rows[r]} for r in both]
        assert not keys[0] & keys[1]
    assert (len(reference), len(reported)) == tuple((limit and min(limit, size)) or size for size in SIZES[name])
    assert len({d.id for d in reference}) == len(reference)
    assert all(d.reference.strip() for d in [*reference, *reported])
    assert not {d.key for d in reference} & {d.key for d in reported}
    if name == "mmlu":
        assert {d.field for d in reference} == {d.field for d in reported} == set(MMLU_SUBJECTS)
