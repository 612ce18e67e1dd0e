"""What goes wrong is said in one line that begins with "error:", without a traceback; exit code 2. Ctrl-C gives 130."""

import subprocess
import sys
from pathlib import Path

import pytest

from freemoe.core.run.journal import RunJournal
from tests.cli.conftest import Done, document

LAW = ["--domain", "law=law.jsonl"]
SMALL = ["build", "freemoe-demo", *LAW, "--metric", "wanda", "--ratio", "0.5", "--theta", "0:1:0.5"]
SMALL += ["--by", "none", "--controls", "0", "--no-oracle", "--threads", "1", "-o", "out"]

# Arguments, and parts of the message: what was seen, and what to do.
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "unknown metric": (
        ["build", "freemoe-demo", *LAW, "--metric", "wandda"],
        ["Unknown metric 'wandda'", "Did you mean 'wanda'", "saliency, wanda, magnitude, random"],
    ),
    "unknown task": (
        ["build", "freemoe-demo", "--domain", "math=gsm9k"],
        ["Unknown task 'gsm9k'", "Did you mean 'gsm8k'", "FILE.jsonl"],
    ),
    "unknown subject": (
        ["eval", "freemoe-demo", "--domain", "g=mmlu_astronmy"],
        ["Unknown task 'mmlu_astronmy'", "'mmlu_astronomy'"],
    ),
    "missing model": (["build", "./no-model", *LAW], ["./no-model"]),
    "missing model to inspect": (["inspect", "no-model"], ["'no-model' is not an artefact"]),
    "missing file": (["build", "freemoe-demo", "--domain", "a=none.jsonl"], ["none.jsonl", "Check the path"]),
    "missing data root": (
        ["build", "freemoe-demo", "--domain", "math=gsm8k", "--data-root", "no-data"],
        ["no-data", "--data-root", "Check the path"],
    ),
    "output exists": (["build", "freemoe-demo", *LAW, "-o", "there"], ["'there' exists already", "--overwrite"]),
    "output is not ours": (
        ["build", "freemoe-demo", *LAW, "-o", "there", "--overwrite"],
        ["'there' is not an artefact", "is not replaced"],
    ),
    "demo over a folder that is not ours": (["demo", "-o", "there", "--overwrite"], ["'there' is not an artefact"]),
    "demo over something, unasked": (["demo", "-o", "there"], ["'there' exists already", "--overwrite"]),
    "output is the current folder": (["build", "freemoe-demo", *LAW, "-o", "."], ["'.' names no new folder"]),
    "result file exists": (
        ["eval", "freemoe-demo", *LAW, "-o", "law.jsonl"],
        ["'law.jsonl' exists already", "--overwrite"],
    ),
    "theta backwards": (
        ["build", "m", *LAW, "--theta", "0.5:0.4:0.1"],
        ["bands: bands end at 0.4", "not above their start 0.5"],
    ),
    "theta in words": (["build", "m", *LAW, "--theta", "half"], ["--theta is 'half'", "A:B:C", "--theta 0.5:1:0.05"]),
    "theta of two": (["build", "m", *LAW, "--theta", "0:1"], ["--theta is '0:1'; write 3 numbers"]),
    "layers": (["build", "m", *LAW, "--layers", "0:4:2"], ["--layers is '0:4:2'; write 2 numbers"]),
    "layers backwards": (["build", "m", *LAW, "--layers", "4:0"], ["0 <= first < last", "value seen: "]),
    "subdomains": (["build", "m", *LAW, "--subdomains", "a=b"], ["--subdomains is 'a=b'", "math=8,code=3"]),
    "subdomains of no domain": (
        ["build", "m", *LAW, "--subdomains", "lwa=3"],
        ["names 'lwa', which is no domain here: law"],
    ),
    "choice": (["build", "m", *LAW, "--scope", "column"], ["bands.scope", "'row' or 'layer'", "'column'"]),
    "limit": (["build", "m", *LAW, "--limit", "0"], ["data.limit", "greater than or equal to 1", "value seen: 0"]),
    "set path": (["build", "m", *LAW, "--set", "search.fold=3"], ["search.fold", "metrics, method, objective"]),
    "set without a value": (["build", "m", *LAW, "--set", "seed"], ["--set 'seed': write PATH=VALUE"]),
    "set through a value": (["build", "m", *LAW, "--set", "model.x=1"], ["--set model.x: 'model' is a value"]),
    "set with broken YAML": (["build", "m", *LAW, "--set", "seed=[1"], ["'[1' is not valid YAML"]),
    "eval set path": (["eval", "m", *LAW, "--set", "data.lmit=3"], ["data.lmit", "root, limit, fewshot"]),
    "no domain": (["build", "m"], ["no domain is given", "NAME=TASK"]),
    "no domain to eval": (["eval", "m"], ["no domain is given", "NAME=TASK"]),
    "domain twice": (["build", "m", "-d", "a=gsm8k", "-d", "a=mathqa"], ["'a' is given twice", "a=TASK,TASK"]),
    "domain twice to eval": (["eval", "m", "-d", "a=gsm8k", "-d", "a=mathqa"], ["'a' is given twice"]),
    "domain without a task": (["build", "m", "-d", "law"], ["'law' cannot be read", "NAME=TASK"]),
    "unknown kind": (["ls", "task"], ["Unknown kind 'task'", "Did you mean 'tasks'"]),
    "unknown document": (["schema", "conver"], ["Did you mean 'convert' or 'converted'"]),
    "no artefact to report": (["report", "there"], ["'there' is not an artefact"]),
    "no artefact to generate with": (["generate", "there", "hi"], ["'there' is not an artefact"]),
    "neither artefact nor model": (["eval", "there", *LAW], ["neither an artefact", "nor a model"]),
    "no recipe": (["run", "none.yaml"], ["'none.yaml' is not a file", "--print-recipe"]),
    "broken recipe": (["run", "broken.yaml"], ["broken.yaml", "bnads", "allowed here", "bands"]),
    "unknown device": (["eval", "freemoe-demo", *LAW, "--device", "banana"], ["Device 'banana'", "auto, cpu, cuda"]),
}


def check_refusal(done, parts):
    assert done.code == 2, done
    assert done.out == ""
    message = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(message) == 1, done.err
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(case, folder, freemoe):
    (folder / "there").mkdir()
    (folder / "there" / "mine").write_text("x")
    (folder / "broken.yaml").write_text("{model: m, domains: {law: law.jsonl}, bnads: {p: 2}}")
    arguments, parts = REFUSED[case]
    done = freemoe(*arguments, "--json")
    check_refusal(done._replace(out=""), parts)
    # The same as a document.
    found = document(done, "error")
    assert (found["exit_code"], f"error: {found['error']}\n" in done.err) == (2, True)
    assert found["kind"] in ("UnknownNameError", "RecipeError", "ArtifactError", "DataError")
    assert (folder / "there" / "mine").read_text() == "x"
    assert not (folder / "freemoe-out").exists()


def test_a_refused_run_does_not_block_the_next(folder, freemoe):
    check_refusal(freemoe("build", "freemoe-demo", "--domain", "law=lwa.jsonl", "-o", "out"), ["lwa.jsonl"])
    second = freemoe("build", "freemoe-demo", "--domain", "law=la.jsonl", "-o", "out")
    check_refusal(second, ["la.jsonl"])
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
    check_refusal(done, ["--allow-code-execution"])


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
    check_refusal(Done(done.returncode, done.stdout, done.stderr), ["'none.yaml' is not a file"])


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
    check_refusal(other, ["unfinished run of another recipe or version (differs in: seed)", "--no-resume"])

    # The recipe beside the command line: the same run, spelt differently.
    (folder / "recipe.yaml").write_text(freemoe(*SMALL, "--print-recipe").out)
    cost = freemoe("run", "recipe.yaml", "--json").json["result"]["cost"]
    assert cost["units_reused"] >= 3
    assert cost["units_done"] > 0
    assert not (folder / "out.partial").exists()

    again = freemoe(*SMALL)
    check_refusal(again, ["'out' exists already"])
    for arguments in (["inspect", "out"], ["report", "out", "--dry-run"], ["report", "out"]):
        assert freemoe(*arguments).code == 0
    assert (folder / "out" / "report.html").is_file()
