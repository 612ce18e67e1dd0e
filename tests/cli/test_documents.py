"""JSON: one document per command, with a schema, its numbers as numbers; the same as lines, and errors as documents."""

import ast
import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.table import Table

import freemoe as package
from freemoe.cli import common
from freemoe.cli.common import CommandOutput
from freemoe.cli.documents import FORMAT, lines_of, print_json
from freemoe.cli.run import COMMANDS
from freemoe.cli.schemas import DOCUMENTS
from tests.cli.conftest import document, numbers_are_numbers
from tests.cli.test_refusals import SMALL


def test_nothing_is_printed_that_json_has_no_word_for(capsys):
    value = {"a": float("nan"), "b": [1, {"c": float("inf")}], "d": Path("x/y"), "e": (1, 2.5), 3: "é"}
    print_json("build", value)
    out = capsys.readouterr().out
    assert json.loads(out) == {
        "schema": f"freemoe.build/{FORMAT}",
        "a": None,
        "b": [1, {"c": None}],
        "d": "x/y",
        "e": [1, 2.5],
        "3": "é",
    }
    assert out.isascii()


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        ({"memory_bytes": 3 * 2**30}, ["memory: 3.0 GiB"]),
        ({"memory_bytes": 5 * 2**20, "bytes": 12}, ["memory: 5.0 MiB", "bytes: 12 bytes"]),
        ({"time_seconds": 0.0123}, ["time: 12.3 ms"]),
        ({"time_seconds": 89.4}, ["time: 89 s"]),
        ({"time_seconds": 600.0}, ["time: 10 minutes"]),
        ({"time_seconds": 7200.0}, ["time: 2.0 hours"]),
        ({"active_share": 0.125}, ["active: 12.5 %"]),
        ({"off_share": 0.00012345}, ["off: 0.0123 %"]),
        ({"block_tokens": 2048}, ["block: 2,048 tokens"]),
        ({"text_tokens": {"train": 1000, "held_out": 2}}, ["text: train 1,000 tokens, held out 2 tokens"]),
        (
            {"documents": {"law": {"reference": 3, "reported": 4}}},
            ["documents: law (reference 3, reported 4)"],
        ),
        ({"fits_base": True, "control": False, "plan": None}, ["fits base: yes", "control: no", "plan: -"]),
        (
            {"experts": ["a", "b"], "notes": ["a, b", "c"], "none": []},
            ["experts: a, b", "notes: a, b; c", "none: none"],
        ),
        ({"rows": [{"name": "a", "share": 0.5}]}, ["rows:", "  name=a  share=0.5"]),
        ({"mean": 1234.5678, "subdomains": 1234}, ["mean: 1,235", "subdomains: 1,234"]),
    ],
)
def test_lines_have_units(found, lines):
    assert lines_of(found) == lines


def test_every_document_that_is_printed_has_a_type():
    printed = set()
    for path in (Path(package.__file__).parent / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                prints = ("print_json", "print_fields", "print_found", "print_result", "print_artefact")
                if name in prints and isinstance(node.args[0], ast.Constant):
                    printed.add(node.args[0].value)
    recipes = {name + end for name in COMMANDS for end in ("", "-plan")}
    assert printed | recipes == set(DOCUMENTS)


def test_types_refuse_other_documents():
    with pytest.raises(ValidationError, match=r"freemoe\.error/1"):
        DOCUMENTS["error"].model_validate({"schema": "freemoe.error/2", "error": "", "kind": "", "exit_code": 2})
    with pytest.raises(ValidationError, match="exit_code"):
        DOCUMENTS["error"].model_validate({"schema": "freemoe.error/1", "error": "", "kind": ""})


@pytest.mark.parametrize("command", DOCUMENTS)
def test_schemas_of_documents_are_printed(command, freemoe):
    done = freemoe("schema", command).ok()
    assert done.json["properties"]["schema"]["const"] == f"freemoe.{command}/{FORMAT}"
    assert freemoe("schema", f"freemoe.{command}/{FORMAT}") == done


@pytest.fixture
def built(folder, freemoe):
    """What a small build printed."""
    return document(freemoe(*SMALL, "--json"), "build")


def test_every_command_prints_one_document(built, folder, freemoe):
    assert built["folder"] == "out"
    assert built["report"] == "out/report.html"
    assert built["result"] == json.loads((folder / "out" / "result.json").read_text())
    experts = document(freemoe("inspect", "out", "--json"), "inspect")["experts"]
    expert = experts[0]["name"] if experts else "base"
    for command, line in {
        "build-plan": [*SMALL, "--dry-run"],
        "generate": ["generate", "out", "1 + 1 =", "--max-new-tokens", "2", "--expert", "base"],
        "merge-plan": ["merge", "out", expert, "--dry-run", "--allow-rejected"],
        "merge": ["merge", "out", expert, "-o", "merged", "--allow-rejected"],
        "inspect": ["inspect", "out", "--base", "freemoe-demo"],
        "report": ["report", "out"],
        "ls": ["ls", "tasks"],
        "eval-plan": ["eval", "out", "--domain", "law=law.jsonl", "--dry-run"],
        "eval": ["eval", "freemoe-demo", "--domain", "law=law.jsonl"],
        "bench": ["bench", "out", "--rounds", "1", "--new-tokens", "3", "--prompt-tokens", "8"],
        "bench-plan": ["bench", "out", "--dry-run"],
        "lm-eval-plan": ["lm-eval", "--dry-run", "--tasks", "gsm8k"],
    }.items():
        done = freemoe(*line, "--json")
        assert done.code == 0, (line, done.err)
        found = document(done, command)
        if command.endswith("plan") or command == "inspect":
            assert numbers_are_numbers(found), found
    plan = document(freemoe("demo", "--dry-run", "--limit", "20", "--json"), "build-plan")
    assert plan["memory_bytes"] > plan["base_bytes"] > 0
    assert plan == document(freemoe("demo", "--dry-run", "--limit", "20", "--json"), "build-plan") | {
        name: plan[name]
        for name in ("time_of_one_document_seconds", "time_by_stage_seconds", "time_of_one_worker_seconds")
    }


def test_what_is_told_of_a_run(capsys, monkeypatch):
    monkeypatch.setattr(common, "plain_result", lambda folder: {"x": 1.5, "notes": ["n"]})

    def told(**shown):
        lines = ["n", "a: 1 -> 2", "b"]
        CommandOutput(**shown).print_result("trim", Path("out"), lines, lambda: [Table("head", box=None)], plans=None)
        return capsys.readouterr().out

    assert [line.strip() for line in told().splitlines()] == [
        "head",
        "n",
        "a: 1 -> 2",
        "b",
        "artefact: out",
        "report: out/report.html",
    ]
    assert told(summary=True).splitlines() == ["n", "a: 1 -> 2", "b", "artefact: out"]
    whole = json.loads(told(as_json=True))
    assert whole == {
        "schema": "freemoe.trim/1",
        "folder": "out",
        "report": "out/report.html",
        "plans": None,
        "headlines": ["n", "a: 1 -> 2", "b"],
        "result": {"x": 1.5, "notes": ["n"]},
    }
    del whole["result"]
    assert json.loads(told(as_json=True, summary=True)) == whole


def test_a_summary_is_the_verdict_and_the_path(built, freemoe):
    done = freemoe(*SMALL, "--summary", "--overwrite")
    assert done.out.splitlines() == [*built["headlines"], "artefact: out"]
    line = ["eval", "out", "-d", "law=law.jsonl", "-o", "scores.json", "--summary"]
    done = freemoe("eval", "freemoe-demo", *line[2:], "--limit", "8")
    verdict, *said, where = done.out.splitlines()
    # Eight questions do not tell a base from guessing, or they do; and the build opened some of them.
    looks = [line for line in said if not line.startswith("base: ")]
    assert all("chance is 50.0 %" in line for line in said if line not in looks)
    # How often, the tests before this one decide.
    assert [line.split(" for the ")[0] for line in looks] == ["These test documents were opened"]
    assert verdict.startswith("law: score base ")
    assert verdict.endswith(", 8 held-out documents")
    assert where == "result: scores.json"
    found = document(freemoe("eval", "freemoe-demo", *line[2:], "--overwrite", "--json"), "eval")
    assert "documents" not in found["domains"][0]


def test_what_cannot_be_parsed_is_a_document_too(freemoe):
    done = freemoe("build", "m", "--metrc", "wanda", "--json")
    found = document(done, "error")
    assert (found["kind"], found["exit_code"], done.code) == ("UsageError", 2, 2)
    assert "Did you mean '--metric'" in found["error"]
    assert f"Error: {found['error']}" in done.err
    # What stands behind -- is no option.
    assert freemoe("generate", "nothing", "--", "--json").out == ""


@pytest.mark.parametrize("command", ["build m -d law=law.jsonl", "demo", "run recipe.yaml"])
def test_yaml_is_no_document(command, folder, freemoe):
    (folder / "recipe.yaml").write_text("{model: m, domains: {law: law.jsonl}}")
    done = freemoe(*command.split(), "--print-recipe", "--json")
    assert "give one of them" in document(done, "error")["error"]


def test_the_page_names_every_document():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert all(f"`freemoe.{command}/1`" in page for command in DOCUMENTS)
