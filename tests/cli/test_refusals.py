"""What goes wrong is said in one line that begins with "error:", without a traceback; exit code 2. Ctrl-C gives 130."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from freemoe.core.run.journal import RunJournal
from tests.cli.conftest import Done, document

LAW = ["--domain", "law=law.jsonl"]
SMALL = ["build", "freemoe-demo", *LAW, "--metric", "wanda", "--ratio", "0.5", "--theta", "0:1:0.5"]
SMALL += ["--by", "none", "--controls", "0", "--no-oracle", "--threads", "1", "-o", "out"]

# A command line, and parts of the message: what was seen, and what to do.
REFUSED = {
    "build freemoe-demo -d law=law.jsonl --metric wandda": [
        "Unknown metric 'wandda'",
        "Did you mean 'wanda'",
        "saliency, wanda, magnitude, random",
    ],
    "build freemoe-demo -d math=gsm9k": ["Unknown task 'gsm9k'", "Did you mean 'gsm8k'", "FILE.jsonl"],
    "eval freemoe-demo -d g=mmlu_astronmy": ["Unknown task 'mmlu_astronmy'", "'mmlu_astronomy'"],
    "build ./no-model -d law=law.jsonl": ["./no-model"],
    "inspect no-model": ["'no-model' is not an artefact"],
    "build freemoe-demo -d a=none.jsonl": ["none.jsonl", "Check the path"],
    "build freemoe-demo -d math=gsm8k --data-root no-data": ["no-data", "--data-root", "Check the path"],
    "build freemoe-demo -d law=law.jsonl -o there": ["'there' exists already", "--overwrite"],
    "build freemoe-demo -d law=law.jsonl -o there --overwrite": ["'there' is not an artefact", "is not replaced"],
    "demo -o there --overwrite": ["'there' is not an artefact"],
    "demo -o there": ["'there' exists already", "--overwrite"],
    "build freemoe-demo -d law=law.jsonl -o .": ["'.' names no new folder"],
    "eval freemoe-demo -d law=law.jsonl -o law.jsonl": ["'law.jsonl' exists already", "--overwrite"],
    "build m -d law=law.jsonl --theta 0.5:0.4:0.1": ["bands: bands end at 0.4", "not above their start 0.5"],
    "build m -d law=law.jsonl --theta half": ["--theta is 'half'", "A:B:C", "--theta 0.5:1:0.05"],
    "build m -d law=law.jsonl --theta 0:1": ["--theta is '0:1'; write 3 numbers"],
    "build m -d law=law.jsonl --layers 0:4:2": ["--layers is '0:4:2'; write 2 numbers"],
    "build m -d law=law.jsonl --layers 4:0": ["0 <= first < last", "value seen: "],
    "build m -d law=law.jsonl --subdomains a=b": ["--subdomains is 'a=b'", "math=8,code=3"],
    "build m -d law=law.jsonl --subdomains lwa=3": ["names 'lwa', which is no domain here: law"],
    "build m -d law=law.jsonl --scope column": ["bands.scope", "'row' or 'layer'", "'column'"],
    "build m -d law=law.jsonl --limit 0": ["data.limit", "greater than or equal to 1", "value seen: 0"],
    "build m -d law=law.jsonl --set search.fold=3": ["search.fold", "metrics, method, objective"],
    "build m -d law=law.jsonl --set seed": ["--set 'seed': write PATH=VALUE"],
    "build m -d law=law.jsonl --set model.x=1": ["--set model.x: 'model' is a value"],
    "build m -d law=law.jsonl --set 'seed=[1'": ["'[1' is not valid YAML"],
    "eval m -d law=law.jsonl --set data.lmit=3": ["data.lmit", "root, limit, fewshot"],
    "build m": ["no domain is given", "NAME=TASK"],
    "eval m": ["no domain is given", "NAME=TASK"],
    "build m -d a=gsm8k -d a=mathqa": ["'a' is given twice", "a=TASK,TASK"],
    "eval m -d a=gsm8k -d a=mathqa": ["'a' is given twice"],
    "build m -d law": ["'law' cannot be read", "NAME=TASK"],
    "ls task": ["Unknown kind 'task'", "Did you mean 'tasks'"],
    "schema conver": ["Did you mean 'convert' or 'converted'"],
    "report there": ["'there' is not an artefact"],
    "generate there hi": ["'there' is not an artefact"],
    "eval there -d law=law.jsonl": ["neither an artefact", "nor a model"],
    "run none.yaml": ["'none.yaml' is not a file", "--print-recipe"],
    "run broken.yaml": ["broken.yaml", "bnads", "allowed here", "bands"],
    "eval freemoe-demo -d law=law.jsonl --device banana": ["Device 'banana'", "auto, cpu, cuda"],
}


@pytest.mark.parametrize(("line", "parts"), REFUSED.items())
def test_refused_in_words(line, parts, folder, freemoe):
    (folder / "there").mkdir()
    (folder / "there" / "mine").write_text("x")
    (folder / "broken.yaml").write_text("{model: m, domains: {law: law.jsonl}, bnads: {p: 2}}")
    done = freemoe(*shlex.split(line), "--json")
    done._replace(out="").refused(*parts)
    # The same as a document.
    found = document(done, "error")
    assert (found["exit_code"], f"error: {found['error']}\n" in done.err) == (2, True)
    assert found["kind"] in ("UnknownNameError", "RecipeError", "ArtifactError", "DataError")
    assert (folder / "there" / "mine").read_text() == "x"
    assert not (folder / "freemoe-out").exists()


def test_a_refused_run_does_not_block_the_next(folder, freemoe):
    freemoe("build", "freemoe-demo", "--domain", "law=lwa.jsonl", "-o", "out").refused("lwa.jsonl")
    second = freemoe("build", "freemoe-demo", "--domain", "law=la.jsonl", "-o", "out")
    second.refused("la.jsonl")
    assert "another recipe" not in second.err


@pytest.mark.realdata
@pytest.mark.parametrize("command", ["build", "eval"])
def test_code_needs_permission_before_anything_is_generated(command, data_root, folder, freemoe, monkeypatch):
    def expensive(*_, **__):
        raise AssertionError("work was done for programs that may not be run")

    monkeypatch.setattr("freemoe.evals.engine.scorer.Scorer.generate", expensive)
    monkeypatch.setattr("freemoe.domain_experts.pipeline.calibrate", expensive)
    task = ["--domain", "code=humaneval", "--data-root", str(data_root), "--limit", "8"]
    done = freemoe(command, "freemoe-demo", *task, *(["--metric", "wanda"] if command == "build" else []))
    done.refused("--allow-code-execution")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("build", ""),
        ("build m --nope", ""),
        ("build m --limit x", ""),
        ("biuld m", "Did you mean 'build'?"),
        ("build m --metrc wanda", "No such option: --metrc. Did you mean '--metric'"),
        ("eval m --expart base", "Did you mean '--expert'"),
    ],
)
def test_what_cannot_be_parsed_shows_the_usage_and_near_misses(line, words, freemoe):
    done = freemoe(*line.split())
    assert done.code == 2
    assert all(part in done.err for part in ("Usage: freemoe", "Error: ", words))
    assert "Traceback" not in done.err


def test_the_installed_command_prints_no_traceback(folder):
    program = Path(sys.executable).with_name("freemoe")
    done = subprocess.run([program, "run", "none.yaml"], capture_output=True, text=True, timeout=60, check=False)
    Done(done.returncode, done.stdout, done.stderr).refused("'none.yaml' is not a file")


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_ctrl_c_before_any_work(folder, freemoe, monkeypatch):
    monkeypatch.setattr(RunJournal, "run_unit", interrupt)
    done = freemoe(*SMALL)
    assert done.code == 130
    assert "Stopped before any unit of work was finished." in done.err
    assert "Traceback" not in done.err


def test_ctrl_c_in_an_evaluation(folder, freemoe, monkeypatch):
    monkeypatch.setattr("freemoe.evals.engine.evaluator.Evaluator.score", interrupt)
    done = freemoe("eval", "freemoe-demo", *LAW, "-o", "result.json", "--json")
    assert (done.code, document(done, "error")["kind"]) == (130, "Stopped")
    for said in (done.err, document(done, "error")["error"]):
        assert "nothing was written. Run the same command" in said
    assert "error:" not in done.err
    assert not (folder / "result.json").exists()


def test_a_build_goes_on_after_ctrl_c(folder, freemoe, monkeypatch):
    real = RunJournal.run_unit

    def unit(self, name, work):
        if self.done == 3:
            raise KeyboardInterrupt
        return real(self, name, work)

    with monkeypatch.context() as patched:
        patched.setattr(RunJournal, "run_unit", unit)
        stopped = freemoe(*SMALL)
    assert stopped.code == 130
    assert "'out.partial'; run the same command again to go on" in stopped.err
    assert not (folder / "out").exists()

    other = freemoe(*SMALL, "--seed", "1")
    other.refused("unfinished run of another recipe or version (differs in: seed)", "--no-resume")

    # The recipe beside the command line: the same run, spelt differently.
    (folder / "recipe.yaml").write_text(freemoe(*SMALL, "--print-recipe").out)
    cost = freemoe("run", "recipe.yaml", "--json").json["result"]["cost"]
    assert cost["units_reused"] >= 3
    assert cost["units_done"] > 0
    assert not (folder / "out.partial").exists()

    again = freemoe(*SMALL)
    again.refused("'out' exists already")
    for arguments in (["inspect", "out"], ["report", "out", "--dry-run"], ["report", "out"]):
        assert freemoe(*arguments).code == 0
    assert (folder / "out" / "report.html").is_file()
