"""The README's Python example runs as it stands, and what the README names is there."""

import re
from pathlib import Path

import pytest

from benchmarks import table
from benchmarks.harness import BENCHES, HARDENING

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def example():
    """The block behind the mark."""
    return README.split("<!-- example -->")[1].split("```python\n")[1].split("```")[0]


@pytest.mark.slow
def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = example()
    assert len([line for line in code.splitlines() if line.strip()]) <= 6
    assert '"limit": 120' in code
    scope = {}
    exec(compile(code.replace('"limit": 120', '"limit": 60'), "README.md", "exec"), scope)
    assert (tmp_path / "experts" / "freemoe_config.json").is_file()
    assert scope["text"]
    assert scope["expert"] in ("base", *scope["moe"].experts)
    assert scope["moe"].active == "base"
    assert scope["expert"] in capsys.readouterr().out


def test_it_is_one_screen_and_a_half():
    assert len(README.splitlines()) <= 95


def test_the_file_map_names_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.split("## Where things are")[1].split("```")[1]
    listed = re.findall(r"^ {0,2}([\w/.-]+/)(?= )", block, flags=re.MULTILINE)
    assert len(listed) > 6
    for name in listed:
        assert (ROOT / name).is_dir() or (ROOT / "src/freemoe" / name).is_dir(), name


def test_the_table_of_figures_is_what_the_benchmarks_left():
    found = table.results()
    assert found
    # Of a benchmark that ran on several machines the other files are called NAME-WHAT.json.
    for result in found:
        assert any(result["bench"] == name or result["bench"].startswith(f"{name}-") for name in (*BENCHES, *HARDENING))
    assert not any(r["quick"] for r in found)
    assert table.rendered(BENCHMARKS, found) == BENCHMARKS
    # A figure that is missed says so in the table as in the JSON.
    missed = sum(f["verdict"] == "missed" for r in found for f in r["figures"])
    assert BENCHMARKS.count("**missed**") == missed


def test_the_two_commands_stand_first():
    commands = README.split("```bash\n")[1]
    assert README.index("```bash\n") == README.index("```")
    assert commands.startswith("make demo")
    assert commands.splitlines()[1].startswith("make test")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^demo:", makefile, flags=re.MULTILINE)
    assert re.search(r"^test:", makefile, flags=re.MULTILINE)
