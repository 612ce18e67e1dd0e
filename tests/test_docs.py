"""The guides name only what is there: flags, fields, files, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from freemoe.cli import app
from freemoe.recipes import BuildRecipe

ROOT = Path(__file__).resolve().parents[1]
GUIDES = [
    ROOT / name
    for name in (
        "docs/methods.md",
        "docs/evidence.md",
        "docs/tomoe.md",
        "docs/hookmoe.md",
        "docs/structured.md",
        "docs/hub.md",
        "docs/pitfalls.md",
        "docs/cli.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    )
]
GUIDES.append(ROOT / "recipes" / "README.md")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = {option for c in COMMANDS.values() for p in c.params for option in [*p.opts, *p.secondary_opts]}
PACKAGE = ROOT / "src" / "freemoe"
PLACES = (ROOT, PACKAGE, PACKAGE / "evals", ROOT / "docs", ROOT / "recipes")

by_guide = pytest.mark.parametrize("guide", GUIDES, ids=[str(g.relative_to(ROOT)) for g in GUIDES])


def text_of(guide: Path) -> str:
    return guide.read_text(encoding="utf-8")


@by_guide
def test_flags_exist(guide: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text_of(guide)))
    assert named <= OPTIONS | {"--help", "--install-completion", "--show-completion"}


@by_guide
def test_commands_exist(guide: Path) -> None:
    named = set(re.findall(r"(?:`|^ {4})freemoe ([a-z][a-z-]*)", text_of(guide), re.MULTILINE))
    assert named <= set(COMMANDS)


@by_guide
def test_fields_exist(guide: Path) -> None:
    for section, field in re.findall(r"`([a-z]+)\.([a-z_]+)[`:]", text_of(guide)):
        if section in BuildRecipe.model_fields:
            assert field in BuildRecipe.model_fields[section].annotation.model_fields, f"{section}.{field}"  # type: ignore[union-attr]


@by_guide
def test_files_exist(guide: Path) -> None:
    for name in set(re.findall(r"`([\w./-]+(?:\.(?:py|md|yaml|jsonl|txt)|/))`", text_of(guide))):
        if name not in ("result.json", "utils.py"):
            assert any((place / name).exists() for place in PLACES), name


@by_guide
def test_lines_are_readable(guide: Path) -> None:
    assert max(map(len, text_of(guide).splitlines())) <= 130


def test_every_make_target_is_described_and_made_without_files_of_its_name() -> None:
    text = text_of(ROOT / "Makefile")
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    assert targets == {"help", "demo", "real", "test", "browser-test", "check", "bench", "clean"}
    assert set(re.search(r"^\.PHONY: (.*)", text, re.MULTILINE)[1].split()) == targets  # type: ignore[index]
    assert all(re.search(rf"^{t}:.*## \w", text, re.MULTILINE) for t in targets)


def test_constraints_pin_everything_exactly_and_fit_the_project() -> None:
    import tomllib

    lines = [line for line in text_of(ROOT / "constraints.txt").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "no local versions, no paths, no ranges"
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    assert len(pinned) == len(lines)
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["eval"],
        *project["optional-dependencies"]["gguf"],
    ]
    names = {re.match(r"[\w-]+", w)[0].lower() for w in wanted} - {"freemoe"}  # type: ignore[index]
    assert names <= pinned
