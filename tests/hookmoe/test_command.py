"""`freemoe trim` and `freemoe eval` as commands: flags are fields, dry runs do nothing, tables are printed."""

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import document, freemoe, numbers_are_numbers  # noqa: F401

SMALL = ["--steps", "2", "--block", "32", "--limit", "6", "--set", "training.held_out=2", "--set", "training.test=3"]


def test_every_flag_is_a_field(freemoe):  # noqa: F811
    line = "trim m --text t.txt -o out --plan tlnle:2,2 --rescale renorm --hooks 0,3 --units 9 --scope routed"
    line += " --position parallel --start ridge --loss lm --steps 7 --rate 0.01 --block 64 --limit 5 --no-control"
    line += " --seed 3 --threads 1 --speed 64,128 --new-tokens 9 --rounds 2 --set plan.best=4 --print-recipe"
    done = freemoe(*line.split(), "--compare", "sweep:4 top_p:0.6,0.2 naee").ok()
    found = yaml.safe_load(done.out)
    assert found["plan"]["given"] == "tlnle:2,2"
    assert (found["plan"]["rescale"], found["plan"]["best"]) == ("renorm", 4)
    assert found["plan"]["compare"] == ["sweep:4", "top_p:0.6,0.2", "naee"]
    assert found["timing"] == {"prompts": [64, 128], "new_tokens": 9, "rounds": 2}
    where = {"layers": [0, 3], "units": 9, "scope": "routed", "position": "parallel"}
    assert found["hooks"] == where | {"start": "ridge", "bias": False}
    training = {"loss": "lm", "steps": 7, "rate": 0.01, "block": 64, "limit": 5, "control": False}
    assert found["training"] | training == found["training"]
    assert (found["seed"], found["threads"], found["output"]) == (3, 1, "out")


def test_a_trim_from_the_command_line_and_its_evaluation(
    freemoe,  # noqa: F811
    saved,
    tmp_path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FREEMOE_LEDGER", str(tmp_path / "ledger"))
    line = ["trim", str(saved / "model"), "--text", str(saved / "text.jsonl"), "--act", "1.0", "-o", "out", *SMALL]
    done = freemoe(*line, "--dry-run").ok()
    assert "plans measured at most" in done.out
    found = document(freemoe(*line, "--dry-run", "--json"), "trim-plan")
    assert found["active_parameters"] > found["least_active_parameters"] > 0
    assert not Path("out").exists()
    done = freemoe(*line, "-q").ok()
    assert "Act 2.000 -> 1.000" in done.out
    guessing = json.loads(Path("out/result.json").read_text()).get("guessing")
    assert (guessing is not None) == ("all tokens alike have" in done.out)
    assert Path("out/plans.svg").is_file()
    page = Path("out/report.html").read_text(encoding="utf-8")
    Path("out/report.html").unlink()
    assert freemoe("report", "out").code == 0
    assert Path("out/report.html").read_text(encoding="utf-8") == page
    result = json.loads(Path("out/result.json").read_text())
    assert f">{result['test']['rows']['hooks']['kl']:.4f}</td>" in page
    # Plans, training, layers.
    assert page.count("<figure") == 3
    # A plan alone has nothing that was trained, and one that was given no search.
    given = [*line[:4], "--plan", "uniform:1", "--hooks", "none", "-o", "alone", *SMALL, "-q"]
    more = ["--compare", "sweep:2 rel_threshold:0.9 naee", "--speed", "8,40", "--new-tokens", "3", "--rounds", "1"]
    done = freemoe(*given, *more).ok()
    alone = json.loads(Path("alone/result.json").read_text())
    assert [row["name"] for row in alone["compared"]][::4] == ["full", "rel_threshold:0.9"]
    # Who compares plans chooses one: not by test text.
    assert alone["compared"][2]["kl"] == pytest.approx(alone["rescale"]["held_out_kl"]["none"])
    assert f"{alone['compared'][-1]['kl']:.4f}" in done.out
    assert (result["cost"]["openings"], alone["cost"]["openings"]) == (1, 2)
    for told in (done.out, Path("alone/report.html").read_text("utf-8"), Path("alone/README.md").read_text("utf-8")):
        assert "opened for the 2nd time" in " ".join(told.split())
    assert [(s["prompt"], s["new_tokens"], s["rounds"]) for s in alone["speed"]["lengths"]] == [(8, 3, 1), (40, 3, 1)]
    assert "prompt of 40 tokens" in done.out
    assert Path("alone/report.html").read_text(encoding="utf-8").count("<figure") == 1
    found = document(freemoe("eval", "out", "--json"), "eval-text")
    assert found["cost"] == {"openings": 3}
    free = {"rescaled"} if result["rescale"]["rule"] != "none" else set()
    assert set(found["rows"]) == {"full", "plan", *free, "hooks"}
    cost = result["cost_of_a_token"]
    assert found["costs"]["full"] == {"act": 2.0, "act_per_layer": {"0": 2.0, "1": 2.0, "2": 2.0}, **cost["full"]}
    assert found["costs"]["hooks"] == {"act": 1.0, "act_per_layer": {"0": 1.0, "1": 1.0, "2": 1.0}, **cost["trimmed"]}
    planned = document(freemoe("eval", "out", "--dry-run", "--json"), "eval-text-plan")
    assert planned["test_blocks"] * (planned["block_tokens"] - 1) >= found["tokens"] > 0
    assert planned["rows"] == list(found["rows"])
    done = freemoe("eval", "out", "--summary")
    assert f"hooks {found['rows']['hooks']['ce']:.4f}" in done.out
    assert len(done.out.splitlines()) == 1
    done = freemoe("eval", "out", "-q")
    assert "won back" in done.out
    assert f"hooks: Act 1.000 (per layer 1, 1, 1), {cost['trimmed']['active']:,} active of" in done.out
    # The recipe inside is the run.
    assert (
        document(freemoe("run", "out/recipe.yaml", "-o", "again", "-q", "--json"), "trim")["plans"] == "again/plans.svg"
    )
    assert numbers_are_numbers(document(freemoe("inspect", "out", "--json"), "inspect"))
    for name in ("hookmoe.safetensors", "plan.json"):
        assert Path("out", name).read_bytes() == Path("again", name).read_bytes()


def test_a_dry_run_refuses_what_the_run_would_in_the_same_words(
    freemoe,  # noqa: F811
    saved,
    tmp_path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    Path("short.jsonl").write_text("\n".join(json.dumps(f"{n} little") for n in range(40)))
    line = ["trim", str(saved / "model"), "--text", "short.jsonl", "--act", "1.0", "-o", "out", "--block", "256"]
    planned, run = freemoe(*line, "--dry-run"), freemoe(*line, "-q")
    assert (planned.code, run.code) == (2, 2)
    assert "less than one block" in planned.err
    assert planned.err == run.err
    assert [path.name for path in tmp_path.iterdir()] == ["short.jsonl"]


def test_errors_are_messages(freemoe, saved, tmp_path):  # noqa: F811
    text = str(saved / "text.jsonl")
    freemoe("trim", str(saved / "dense"), "--text", text, "-o", str(tmp_path / "o"), "--plan", "uniform:1").refused(
        "dense"
    )
    freemoe("trim", str(saved / "model"), "--text", text, "--hooks", "some").refused(
        "write all, one, none, or layer numbers"
    )
