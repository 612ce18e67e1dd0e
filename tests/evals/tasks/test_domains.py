import subprocess
import sys

import pytest

from freemoe.core.errors import DataError, RecipeError, UnknownNameError
from freemoe.evals.tasks.domains import is_file_spec, load_domain, parse_domain
from freemoe.recipes import DataSection
from tests.rows import write_rows
from tests.tiny import tiny_tokenizer


def task_file(path, prefix, count=20):
    return write_rows(path, [{"prompt": f"{prefix}{i}", "target": "t"} for i in range(count)])


def test_parse():
    assert parse_domain("math=gsm8k,mathqa") == ("math", ("gsm8k", "mathqa"))
    assert parse_domain(" wiki = text:a.txt::b.txt ") == ("wiki", ("text:a.txt::b.txt",))


@pytest.mark.parametrize("text", ["math", "=gsm8k", "math=", "math=gsm8k,", "math=gsm8k,gsm8k"])
def test_parse_refuses(text):
    with pytest.raises(RecipeError):
        parse_domain(text)


def test_a_file_name_may_hold_a_comma(tmp_path):
    path = task_file(tmp_path / "a,b.jsonl", "p")
    assert parse_domain(f"d={path}") == ("d", (str(path),))


def test_file_specs():
    assert all(map(is_file_spec, ["a.jsonl", "dir/a", "text:a", "a::b", "a.txt"]))
    assert not any(map(is_file_spec, ["gsm8k", "mmlu_anatomy", "gsm8k@5", "mbpp+train"]))


@pytest.mark.parametrize(("spec", "near"), [("gsm8", "gsm8k"), ("mmlu_anatomie", "mmlu_anatomy")])
def test_unknown_names_get_near_misses(spec, near):
    with pytest.raises(UnknownNameError, match=f"Did you mean '{near}'"):
        load_domain("d", [spec])


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("gsm8k@five", "'five' is no few-shot count; write gsm8k@5"),
        ("gsm8k@-1", "'-1' is no few-shot count"),
        ("gsm8k@", "'' is no few-shot count"),
        (f"gsm8k@{'9' * 5000}", "is no few-shot count"),
        ("gsm8k:", "names no metric behind its colon"),
        ("lm_eval:sums@1:", "names no metric behind its colon; write lm_eval:sums:acc"),
        ("@5", "names no task"),
        ("mbpp+test", r"allowed: mbpp\+train"),
        ("wikitext@5", "plain text takes no few-shot examples"),
    ],
)
def test_names_that_cannot_be_read(spec, told):
    with pytest.raises(RecipeError, match=told):
        load_domain("d", [spec])


def test_missing_files_name_the_path(tmp_path):
    for spec, root, said in (
        (f"{tmp_path}/nope.jsonl", None, r"no file at .*nope\.jsonl"),
        ("gsm8k", f"{tmp_path}/nope", "--data-root"),
        (str(task_file(tmp_path / "a.csv", "p")), None, "a.csv, row 2: no known key"),
    ):
        with pytest.raises(DataError, match=said):
            load_domain("d", [spec], DataSection(root=root))


def test_tasks_are_pooled_and_kept_apart(tmp_path):
    a = task_file(tmp_path / "a.jsonl", "p")
    b = task_file(tmp_path / "b.jsonl", "p")  # the same documents, carved alike
    c = task_file(tmp_path / "c.jsonl", "q")
    domain = load_domain("d", [str(a), f"{c}::{b}"])
    keys = {d.key for d in domain.reference.documents}
    assert not keys & domain.reported.content_keys()
    assert "reference documents dropped" in domain.notes[-1]
    assert set(domain.graders) == {"a", "c"}


def test_a_shape_may_stand_before_both_sources(tmp_path):
    for name in "ab":
        write_rows(tmp_path / f"{name}.jsonl", [{"question": f"{name}{i}", "answer": "x"} for i in range(4)])
    specs = [f"completion:{tmp_path}/a.jsonl::{shape}{tmp_path}/b.jsonl" for shape in ("", "completion:")]
    once, twice = (load_domain("d", [spec], tokenizer=tiny_tokenizer()) for spec in specs)
    assert once.reference == twice.reference
    assert len(once.reported) == len(twice.reported) == 4


def test_two_tasks_of_one_name(tmp_path):
    a, b = task_file(tmp_path / "a.jsonl", "p"), task_file(tmp_path / "x" / "a.jsonl", "q")
    with pytest.raises(DataError, match="called 'a'"):
        load_domain("d", [str(a), str(b)])


def test_own_tasks_need_neither_torch_nor_lm_eval(tmp_path):
    path = task_file(tmp_path / "a.jsonl", "p")
    code = (
        "import sys; from freemoe.evals.tasks.domains import load_domain\nd = load_domain('d', "
        f"[{str(path)!r}]); assert len(d.reference) == 10\nloaded = {{'torch', 'lm_eval', 'datasets', "
        "'transformers', 'evaluate'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lm_eval_absent_says_what_to_install(tmp_path, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'freemoe\[eval\]'"):
        load_domain("d", ["gsm8k"], DataSection(root=str(tmp_path)))
