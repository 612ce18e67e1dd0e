"""``lm_eval:NAME`` on the command line: what a build would do, an evaluation, and a refusal."""

import runpy
import sys
from functools import partial

import pytest

from freemoe.cli.listing import OTHER_TASKS
from tests.lm_eval_files import SIZES, write_task

# lm-eval and its libraries warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_dry_run_of_a_build_shows_the_splits(freemoe, tmp_path):
    spec = ["-d", "sums=lm_eval:sums+train", "--task-folder", write_task(tmp_path)]
    done = freemoe("build", "freemoe-demo", *spec, "--by", "none", "--dry-run", "-o", str(tmp_path / "out")).ok()
    assert "reference validation+train, reported test; reference 54 of 54; reported 20 of 20" in done.out
    assert "metric acc (brier_score left out: no mean over documents)" in done.out


def test_an_evaluation(freemoe, tmp_path):
    spec = ["-d", "sums=lm_eval:sums@1", "--task-folder", write_task(tmp_path)]
    (domain,) = freemoe("eval", "freemoe-demo", *spec, "--limit", "12", "--json").json["domains"]
    assert domain["rows"]["base"]["documents"] == 12 < SIZES["test"]
    assert "1-shot from train" in domain["notes"][0]


def test_a_refusal_ends_the_command(freemoe, tmp_path):
    done = freemoe("build", "freemoe-demo", "-d", "m=lm_eval:mmlu", "-o", str(tmp_path / "out"))
    done.refused("error: Task 'lm_eval:mmlu': mmlu is a group of 57 tasks")
    assert not list(tmp_path.iterdir())


def test_the_list_of_tasks_says_that_there_are_others(freemoe):
    assert OTHER_TASKS[0] == "lm_eval:NAME"
    assert freemoe("ls", "tasks", "--json").json["tasks"][-1]["name"] == "lm_eval:NAME"


def test_lm_evals_own_command_as_a_module_of_ours(tmp_path, monkeypatch, capsys):
    from lm_eval import tasks

    folder = write_task(tmp_path)
    # To index lm-eval's own tasks takes most of ten seconds.
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    line = f"run --model freemoe --model_args pretrained=freemoe-demo --tasks sums --limit 4 --include_path {folder}"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *line.split()])
    monkeypatch.delitem(sys.modules, "freemoe.lm_eval", raising=False)
    runpy.run_module("freemoe.lm_eval", run_name="__main__")
    assert "|sums|" in capsys.readouterr().out.replace(" ", "")
