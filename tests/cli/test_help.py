"""Help: every command has an example, and every example works as it stands."""

import re
import shlex

import pytest
import typer.main

from freemoe import __version__
from freemoe.cli import app
from freemoe.recipes import load_recipe

GROUP = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)  # type: ignore[attr-defined]
PRINTERS = [c for c in COMMANDS if "print_recipe_" in {p.name for p in GROUP.commands[c].params}]  # type: ignore[attr-defined]


def examples(text):
    """Every example of a help text, as one line each."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip() for line in joined.splitlines() if line.strip().startswith("freemoe ")]


EXAMPLES = [(c, e) for c in COMMANDS for e in examples(GROUP.commands[c].help or "")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_on_a_line_of_its_own(command, freemoe):
    done = freemoe(command, "--help").ok()
    shown = examples(done.out)
    assert shown
    # Wrapping the text to the terminal must not have cut or joined any of them.
    assert shown == [e for c, e in EXAMPLES if c == command]


@pytest.mark.parametrize(("command", "example"), EXAMPLES, ids=[f"{c}-{i}" for i, (c, _) in enumerate(EXAMPLES)])
def test_every_example_parses(command, example, folder, freemoe):
    line, _, target = example.partition(" > ")
    program, name, *arguments = shlex.split(line)
    assert program == "freemoe"
    GROUP.commands[name].make_context(name, list(arguments))  # type: ignore[attr-defined]
    if name == "run":
        (folder / "recipe.yaml").write_text("{model: m, domains: {law: law.jsonl}}")
    if name in PRINTERS:
        done = freemoe(name, *arguments, *([] if target else ["--print-recipe"])).ok()
        (folder / "printed.yaml").write_text(done.out, encoding="utf-8")
        assert load_recipe(folder / "printed.yaml").command == {"run": "build", "demo": "build"}.get(name, name)


def test_every_command_can_be_asked_not_to_act():
    for command in COMMANDS:
        names = {p.name for p in GROUP.commands[command].params}  # type: ignore[attr-defined]
        assert {"dry_run", "as_json"} <= names, command


CHEAP = [(c, e) for c, e in EXAMPLES if c in ("bench", "lm-eval", "ls", "schema", "demo")]


@pytest.mark.parametrize(("command", "example"), CHEAP, ids=[f"{c}-{i}" for i, (c, _) in enumerate(CHEAP)])
def test_examples_that_cost_nothing_are_run(command, example, folder, freemoe):
    (folder / "data").mkdir()
    arguments = shlex.split(example)[1:]
    done = freemoe(*arguments, "--print-recipe" if command == "demo" else "--dry-run").ok()
    assert done.out


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_not_cut(command, columns, freemoe, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    grouped = command and getattr(GROUP.commands[command], "common", None) is not None  # type: ignore[attr-defined]
    done = freemoe(*([command] if command else []), "--help-all" if grouped else "--help").ok()
    assert "…" not in done.out
    assert "..." not in re.sub(r"\}\.\.\.|\[ARGS\]\.\.\.|EXPERT\.\.\.|expert\.\.\. <|names\.\.\. <", "", done.out)
    # Examples stay on one line, to be copied.
    body = re.sub(r"(?m)^ +freemoe .*(\\\n.*)*$", "", done.out)
    assert not [line for line in body.splitlines() if len(line) > columns]
    if not command:
        return
    told = "".join(done.out.split())  # a word may be broken at its hyphens
    for parameter in GROUP.commands[command].params:  # type: ignore[attr-defined]
        for option in [*parameter.opts, *parameter.secondary_opts]:
            assert option in told
        assert "".join((parameter.help or "").split()) in told
    if columns == 120:
        assert any(len(w) > 80 for w in done.out.splitlines())


@pytest.mark.parametrize("command", ["build", "convert", "trim", "eval"])
def test_help_shows_the_usual_options_in_groups_and_says_how_many_more(command, freemoe):
    shown, whole = freemoe(command, "--help").out, freemoe(command, "--help-all").out
    few, every = (set(re.findall(r"(?m)^  (?:-\w, )?(--[\w-]+)", text)) for text in (shown, whole))
    assert few < every
    assert len(few) <= 25
    assert f"{len(every - few)} more options: freemoe {command} --help-all" in shown
    assert [w for w in ("Data:", "Method:", "Compute:", "Output:") if f"\n{w}\n" in shown] or command == "eval"
    assert "more options" not in whole


def test_the_overview_lists_every_command(freemoe):
    done = freemoe("--help").ok()
    assert "Start with: freemoe demo" in done.out
    for command in COMMANDS:
        assert bool(re.search(rf"^  {command} ", done.out, re.MULTILINE)) == (command != "schema")


def test_the_version(freemoe):
    assert freemoe("--version") == (0, f"freemoe {__version__}\n", "")


def test_ls_lists_all_kinds_or_one(freemoe):
    found = freemoe("ls", "--json").json
    del found["schema"]
    shown, one = freemoe("ls"), freemoe("ls", "metrics")
    assert (shown.code, one.code) == (0, 0)
    assert {"families", "tasks", "metrics", "searches"} <= found.keys()
    for kind, rows in found.items():
        assert all(row["name"] and row["about"] for row in rows)
        assert kind in shown.out
        assert rows[0]["name"] in shown.out
    assert "wanda" in one.out
    assert "gsm8k" not in one.out
