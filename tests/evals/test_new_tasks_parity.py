"""Tasks whose files are not at hand: made-up files in their format give the requests and grades of lm-eval's own."""

import json

import pytest

from freemoe.compat.lm_eval import official_config
from freemoe.core.errors import DataError
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.benchmarks import BENCHMARKS
from freemoe.evals.tasks.domains import load_domain, make_task
from freemoe.recipes import DataSection
from tests.evals.test_lm_eval_parity import answering, arguments, lm_eval_samples, rows_of, same_choices
from tests.rows import write_rows
from tests.tiny import tiny_model, tiny_tokenizer

# lm-eval and its libraries warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")

PLACES = ("lake", "barn", "road", "hill", "shop", "mill")


def _winogrande(part, i):
    a, b = PLACES[i % 6], PLACES[(i + 1 + i // 6) % 6]
    sentence = f"Number {part} {i}: she left the {a} for the {b} because the _ was {'cold' if i % 2 else 'near'}."
    return {"qID": f"{part}{i}", "sentence": sentence, "option1": a, "option2": b, "answer": str(1 + i % 2)}


def _truthful(i):
    false = {f"false {i} {k}": 0 for k in range(1 + i % 3)}
    return {
        "question": f"Is it {i}?",
        "mc1_targets": {**false, f"true {i}": 1},
        "mc2_targets": {f"true {i}": 1, **false, f"also true {i}": 1},
    }


def _problem(part, subject, i):
    answer = (f"{i}", rf"\frac{{{i}}}{{7}}", f"{i},{i + 1}")[i % 3]
    solution = rf"So $\boxed{{{answer}}}$."
    return {"problem": f"{subject} {part} {i}?", "level": "Level 1", "type": subject, "solution": solution}


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """A data root with a few documents of each, laid out as their authors publish them."""
    root = tmp_path_factory.mktemp("data")
    for part in ("train", "val"):
        rows = [
            {"idx": i, "passage": f"{part} passage {i // 2}", "question": f"is {part} {i} so", "label": i % 3 == 0}
            for i in range(24)
        ]
        write_rows(root / f"boolq/{part}.jsonl", rows)
    write_rows(root / "winogrande/train_xl.jsonl", [_winogrande("train", i) for i in range(24)])
    write_rows(root / "winogrande/dev.jsonl", [_winogrande("dev", i) for i in range(14)])
    for part in ("train", "valid", "test"):
        rows = [
            {"question": f"{part} {i}?", "distractor1": "x", "distractor2": "yy", "distractor3": f"z{i}",
             "correct_answer": f"right {i}", "support": f" about {i}" if i % 2 else ""}
            for i in range(14)
        ]  # fmt: skip
        write_rows(root / f"sciq/{part}.json", [json.dumps(rows)])
    for part in ("train", "valid"):
        goals = [{"goal": f"{part} goal {i}", "sol1": f"do {i}", "sol2": f"do not {i}"} for i in range(14)]
        write_rows(root / f"piqa/{part}.jsonl", goals)
        write_rows(root / f"piqa/{part}-labels.lst", [i % 2 for i in range(14)])
    write_rows(root / "truthfulqa/mc_task.json", [json.dumps([_truthful(i) for i in range(24)])])
    row = BENCHMARKS["hendrycks_math"]
    for subject in row.subjects:
        for part in ("train", "test"):
            for i in range(12):
                write_rows(root / f"{row.source_path(part, subject)}/{i}.json", [_problem(part, subject, i)])
    return root


@pytest.fixture(scope="module")
def lm():
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=1024)
    return theirs, Scorer(model, tokenizer, max_length=1024)


@pytest.mark.parametrize(
    "spec", ["boolq", "winogrande", "winogrande@2", "sciq", "sciq@1", "piqa", "truthfulqa_mc1", "truthfulqa_mc2"]
)
def test_choice(spec, made_up, lm):
    task = make_task(spec, DataSection(root=str(made_up), limit=8))
    documents, part = task.reported(), task._parts[0]
    shots = [r for _, r in part.rows["shots"]][: part.shots]
    config = {**official_config(task.row.yaml), "fewshot_config": {"sampler": "first_n"}}
    samples = lm_eval_samples(config, rows_of(task, documents), shots, lm[0], num_fewshot=part.shots)
    assert len(documents) == 8
    same_choices(task, documents, samples, lm[1], tolerance=1e-3)
    for document in documents:
        # The right answer, told to the grader as the likeliest, is right.
        told = [(0.0 if i == document.gold else -50.0, False) for i in range(len(document.answers))]
        assert task.grade(document, told)["acc"] == pytest.approx(1)


def test_winogrande_hides_the_choice_from_its_prompt_and_calibrates_on_the_right_one(made_up):
    document = make_task("winogrande", DataSection(root=str(made_up))).reported()[3]
    row = _winogrande("dev", 3)
    assert document.prompt == row["sentence"]
    right = row["sentence"].replace("_", row[f"option{row['answer']}"])
    assert document.contexts[document.gold] + document.answers[document.gold] == right
    assert document.prompt.partition("_")[0] + document.reference == right
    scorer = Scorer(tiny_model("llama"), tiny_tokenizer(), max_length=1024)
    pair = scorer.gold_pair(document)
    assert scorer.tokenizer.decode(pair.context + pair.continuation) == right
    assert pair == scorer.document_pairs(document)[document.gold]


def _same_grades(spec, made_up, texts_of):
    task = make_task(spec, DataSection(root=str(made_up), limit=8))
    documents = task.reported()
    texts = [texts_of(d, i) for i, d in enumerate(documents)]
    answers = dict(zip([d.prompt for d in documents], texts, strict=True))
    part = task._parts[0]
    config = {**official_config(task.row.yaml.format(subject=part.subject)), "process_docs": None}
    samples = lm_eval_samples(config, rows_of(task, documents), [], answering(answers), num_fewshot=part.shots)
    assert len(samples) == 8
    grades = []
    for document, text in zip(documents, texts, strict=True):
        (sample,) = [s for s in samples if arguments(s)[0][0] == document.prompt]
        grade = task.grade(document, [text])
        assert grade == {name: float(sample[name]) for name in grade}
        grades.append(grade["exact_match"])
    return grades


def test_math_grades(made_up):
    odd = ["", "No idea.", r"It is $\frac17$ or $2$", "$ 3 $"]
    grades = _same_grades(
        "hendrycks_math_num_theory", made_up, lambda d, i: f"It is ${d.reference.strip()}$." if i < 4 else odd[i - 4]
    )
    assert grades[:4] == [1.0] * 4
    assert min(grades) == 0.0


def test_minerva_grades(made_up):
    pytest.importorskip("math_verify")
    final = "Final Answer: The final answer is"
    odd = ["", final, f"{final} $x^$. I hope it is correct.", "4"]
    grades = _same_grades("minerva_math_algebra", made_up, lambda d, i: d.reference if i < 4 else odd[i - 4])
    assert grades[:4] == [1.0] * 4
    assert min(grades) == 0.0
    task = make_task("minerva_math_algebra", DataSection(root=str(made_up)))
    assert task.reported()[0].prompt.count("Problem:") == 5
    # An equal expression that is written otherwise: 10/7.
    document = next(d for d in task.reported() if "algebra test 10?" in d.prompt)
    said = rf" {final} $1+\frac{{3}}{{7}}$. I hope it is correct."
    assert task.grade(document, [said])["exact_match"] == 1.0


def test_all_subjects_of_math_are_one_task(made_up):
    data = load_domain("math", ["hendrycks_math"], DataSection(root=str(made_up), limit=14))
    assert {d.field for d in data.reference.documents} == set(BENCHMARKS["hendrycks_math"].subjects)
    assert "reference train, reported test" in data.notes[0]


def test_minerva_without_its_libraries_says_which_extra(made_up, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else find(name))
    with pytest.raises(DataError, match=r"math_verify is not installed here\. pip install 'freemoe\[eval,math\]'"):
        make_task("minerva_math_algebra", DataSection(root=str(made_up)))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("boolq", "BoolQ.zip of SuperGLUE"),
        ("winogrande", "winogrande_1.1.zip"),
        ("sciq", "SciQ.zip"),
        ("piqa", "physicaliqa-train-dev.zip"),
        ("truthfulqa_mc1", "817 questions"),
        ("hendrycks_math", "20 MB"),
    ],
)
def test_a_file_that_is_not_there_is_named_with_its_size_and_source(spec, said, tmp_path):
    with pytest.raises(DataError, match=said):
        make_task(spec, DataSection(root=str(tmp_path)))


GOAL = {"piqa/train.jsonl": {"goal": "g", "sol1": "a", "sol2": "b"}}
NO_TRUTH = [{"question": "q", "mc1_targets": {"a": 0}, "mc2_targets": {"a": 1}}]
NO_BOX = {"problem": "p", "solution": "no box"}


@pytest.mark.parametrize(
    ("spec", "held", "said"),
    [
        ("piqa", GOAL, "labels are not beside it"),
        ("piqa", {**GOAL, "piqa/train-labels.lst": "0\n1"}, "2 labels for 1 goals"),
        ("truthfulqa_mc1", {"truthfulqa/mc_task.json": NO_TRUTH}, "mark true answers with 1"),
        ("hendrycks_math_algebra", {"math/train/algebra/1.json": NO_BOX}, r"no .*boxed"),
    ],
)
def test_malformed_files(spec, held, said, tmp_path):
    for path, row in held.items():
        write_rows(tmp_path / path, [row])
    with pytest.raises(DataError, match=said):
        make_task(spec, DataSection(root=str(tmp_path)))
