"""What the installed lm-eval gives to the names that freemoe takes from it, and what is said where one is gone."""

import logging
import shutil
import sys
from functools import lru_cache

import pytest

from freemoe.compat import lm_eval as compat
from freemoe.compat.names import quiet_loggers
from freemoe.core.errors import VersionError

lm_eval = pytest.importorskip("lm_eval")


def test_loggers_are_quiet_inside_alone():
    logger = logging.getLogger("lm_eval.tasks")
    before = logger.level
    with quiet_loggers("lm_eval.tasks"):
        assert logger.level == logging.ERROR
    assert logger.level == before
    with pytest.raises(RuntimeError, match="on purpose"), quiet_loggers("lm_eval.tasks"):
        raise RuntimeError("on purpose")
    assert logger.level == before
    with quiet_loggers("lm_eval.of.no.one"):
        assert logging.getLogger("lm_eval.of.no.one").level == logging.ERROR
        assert logger.level == before


def test_a_configuration_is_lm_evals_own():
    assert compat.official_config("gsm8k/gsm8k.yaml")["task"] == "gsm8k"
    # Functions that a file names are functions here.
    assert callable(compat.official_config("hellaswag/hellaswag.yaml")["process_docs"])


def test_a_task_that_this_release_has_not():
    with pytest.raises(
        VersionError, match=r"^lm-eval [\d.]+ has no .*nothing/nothing\.yaml; .* tried with lm-eval>=0\.4"
    ):
        compat.official_config("nothing/nothing.yaml")


def test_a_name_is_found_without_the_whole_index(monkeypatch):
    monkeypatch.setattr(compat, "_whole_index", lambda: pytest.fail("the whole of lm-eval's index was read"))
    found = compat.find_task("arc_easy")
    assert (found.name, found.kind, found.yaml.name) == ("arc_easy", "task", "arc_easy.yaml")
    assert found.config["test_split"] == "test"
    assert compat.find_task("mmlu").members[:2] == ("mmlu_abstract_algebra", "mmlu_anatomy")


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.hardening)])
def test_what_is_found_is_what_lm_evals_whole_index_has(some, tmp_path, monkeypatch):
    if some:  # all folders take most of ten seconds
        for name in ("arc", "hellaswag", "bbh", "squadv2", "truthfulqa"):
            shutil.copytree(compat._tasks_folder() / name, tmp_path / name)
        monkeypatch.setattr(compat, "_tasks_folder", lambda: tmp_path)
        monkeypatch.setattr(compat, "_whole_index", lru_cache(compat._whole_index.__wrapped__))
    index = compat._whole_index()
    names = list(index)[:: len(index) // 9]
    names += ["ai2_arc", "hellaswag", "bbh_cot_fewshot_navigate", "squadv2", "truthfulqa_mc1"]
    for name in names:
        found = compat.find_task(name)
        assert found is not None, name
        assert found.yaml == index[name].yaml_path
        assert (found.kind == "group") == (index[name].kind.name in ("GROUP", "TAG"))
    assert compat.find_task("no such task") is None
    assert set(compat.known_tasks()) == set(index)


def test_templates_are_compiled_once():
    from lm_eval.utils import env

    source = "{{ a }} of a template that no task has"
    assert env.from_string(source) is not env.from_string(source)
    with compat.templates_compiled_once():
        made = env.from_string(source)
        with compat.templates_compiled_once():
            assert env.from_string(source) is made
        assert env.from_string(source) is made
        assert made.render(a="one") == "one of a template that no task has"
    assert "from_string" not in env.__dict__


def test_the_metric_of_code_is_replaced_inside_alone():
    import evaluate

    load = evaluate.load
    with compat.code_metric_replaced(7):
        assert evaluate.load("code_eval") == 7
        sys.modules[compat.CODE_MODULES[0]] = logging
    assert evaluate.load is load
    assert compat.CODE_MODULES[0] not in sys.modules
    with pytest.raises(RuntimeError, match="on purpose"), compat.code_metric_replaced(7):
        raise RuntimeError("on purpose")
    assert evaluate.load is load
