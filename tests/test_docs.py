"""The guides name only what is there: flags, fields, files, commands, links; and their code is code."""

import re
import tomllib
from pathlib import Path
from urllib.parse import urlparse

import pytest
import typer.main
import yaml

from benchmarks.cli import app as benchmarks
from benchmarks.harness import BENCHES
from freemoe.cli import app
from freemoe.domain_experts.recipe import BuildRecipe
from reproduce.cli import app as reproduce
from reproduce.table import find
from scripts import docs_blocks, docs_pages

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("docs/**/*.md"))]
GUIDES = [page for page in PAGES if page.parent.name != "benchmarks"]
GUIDES += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
COMMANDS = typer.main.get_command(app).commands
BESIDE = [typer.main.get_command(program) for program in (benchmarks, reproduce)]
OPTIONS = {o for c in [*COMMANDS.values(), *BESIDE] for p in c.params for o in [*p.opts, *p.secondary_opts]}
# Of other programs that the guides call.
OTHERS = {"--tasks", "--python"} | {"--head", "--port", "--address", "--include-dashboard", "--ray-client-server-port"}
OTHERS |= {"--enforce-eager", "--no-deps", "--count"}  # of vLLM, pip and benchmarks/serve/neighbours.py
PACKAGE = ROOT / "src" / "freemoe"
PLACES = (ROOT, PACKAGE, PACKAGE / "evals", ROOT / "docs")

by_guide = pytest.mark.parametrize("guide", GUIDES, ids=[str(g.relative_to(ROOT)) for g in GUIDES])


def text_of(guide):
    return guide.read_text(encoding="utf-8")


def test_pages_whose_blocks_run_are_there():
    assert [page for page in docs_blocks.PAGES if not page.is_file()] == []
    assert set(PAGES) < set(docs_blocks.PAGES)


def commands_in(guide):
    """Inline code, and the blocks for a shell."""
    found = [f"`{code}" for code in re.findall(r"`([^`\n]+)`", text_of(guide))]
    return "\n".join([*found, *(b.commands for b in docs_blocks.blocks(guide) if b.language in docs_blocks.SHELL)])


@by_guide
def test_flags_exist(guide):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text_of(guide)))
    assert named <= OPTIONS | {"--help", "--install-completion", "--show-completion", "--version", *OTHERS}


@by_guide
def test_commands_exist(guide):
    named = set(re.findall(r"(?:`|^ {0,4})freemoe ([a-z][a-z-]*)", commands_in(guide), re.MULTILINE))
    assert named <= set(COMMANDS)
    for name in re.findall(r"python -m benchmarks ([a-z][a-z-]*)", commands_in(guide)):
        assert name in (*BENCHES, "all")
    for name in re.findall(r"python -m reproduce (?!check\b)([a-z][a-z0-9/-]*)", commands_in(guide)):
        assert find([name])


@by_guide
def test_fields_exist(guide):
    for section, field in re.findall(r"`([a-z]+)\.([a-z_]+)[`:]", text_of(guide)):
        if section in BuildRecipe.model_fields and field != "safetensors":
            assert field in BuildRecipe.model_fields[section].annotation.model_fields, f"{section}.{field}"


@by_guide
def test_files_exist(guide):
    for name in set(re.findall(r"`([\w./-]+(?:\.(?:py|md|yaml|jsonl|txt)|/))`", text_of(guide))):
        # Data files without a folder are a reader's own, or what a run writes.
        if name not in ("utils.py", "site/") and ("/" in name or name.endswith((".py", ".md"))):
            assert any((place / name).exists() for place in PLACES), name


@by_guide
def test_lines_are_readable(guide):
    # The table of figures is made, not written; a table's row cannot be broken.
    lines = [line for line in text_of(guide).splitlines() if not line.startswith("|")]
    assert max(map(len, lines)) <= 130


@by_guide
def test_blocks_are_code_and_say_so(guide):
    assert [f"{b.place}: {docs_blocks.fault(b)}" for b in docs_blocks.blocks(guide) if docs_blocks.fault(b)] == []
    # Without a fence nobody would run it.
    assert not re.search(r"^\n {4}freemoe ", text_of(guide), re.MULTILINE)


@by_guide
def test_links_lead_somewhere(guide):
    # Those inside the site, anchors included, are checked again by `mkdocs build --strict`.
    # The first page is read on code hosts too, where pages that `make docs` makes are not there.
    made = [] if guide == ROOT / "docs" / "index.md" else docs_pages.MADE
    text = re.sub(r"```.*?```", "", text_of(guide), flags=re.DOTALL)
    targets = [*re.findall(r"(?<!`)\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|href|srcset)="([^"]+)"', text)]
    for target in targets:
        url = urlparse(target)
        if url.scheme:
            assert url.scheme == "https", target
            assert "." in url.netloc, target
        elif url.path:
            place = (guide.parent / url.path).resolve()
            assert place.exists() or any(place == ROOT / "docs" / page for page in made), f"{target} in {guide.name}"


def test_each_change_is_said_once():
    # Branches that edit one line leave it twice when they meet.
    starts = [" ".join(entry.split())[:60] for entry in text_of(ROOT / "CHANGELOG.md").split("\n- ")[1:]]
    assert [start for start in starts if starts.count(start) > 1] == []


def test_every_page_stands_in_the_navigation():
    navigation = re.findall(r"[\w/-]+\.md", text_of(ROOT / "mkdocs.yml").split("nav:")[1].split("exclude_docs")[0])
    assert sorted(set(navigation)) == sorted(navigation)
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES} | set(docs_pages.MADE)
    assert pages <= set(navigation)
    assert yaml.safe_load(text_of(ROOT / "mkdocs.yml"))["nav"][0] == {"Home": "index.md"}


def test_made_pages_hold_every_command_field_and_benchmark():
    made = docs_pages.pages()
    assert set(made) == set(docs_pages.MADE)
    options = {o for c in COMMANDS.values() for p in c.params for o in p.opts if o.startswith("--")} - {"--help"}
    assert {o for o in options if f"`{o}`" not in made["reference/commands.md"]} == set()
    for section, field in BuildRecipe.model_fields.items():
        inside = getattr(field.annotation, "model_fields", None)
        for path in [f"{section}.{name}" for name in inside] if inside else [section] if section != "command" else []:
            assert f"| `{path}` |" in made["reference/recipes.md"]
    assert "| wikitext | learned-1% |" in made["times.md"]


def test_a_block_that_fails_is_found(tmp_path, monkeypatch):
    page = ROOT / "docs" / "index.md"
    good, bad = "```bash\ntrue\n```\n", "```bash\necho seen && false\n```\n"
    skipped = "<!-- not run: it never ends -->\n```bash\nfalse\n```\n"
    session = "```console\n$ true\nwhat it says (\n$ echo 1\n1\n```\n"
    monkeypatch.setattr(docs_blocks, "ROOT", tmp_path)
    raising = "```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n"
    for text, run, failures in (
        (good + skipped, 1, 0),
        (bad + good, 1, 1),
        (session, 1, 0),
        (raising, 2, 1),
        ("```\nx\n```\n", 0, 1),
    ):
        here = tmp_path / page.name
        here.write_text(text)
        done, wrong = docs_blocks.run_page(here, tmp_path)
        assert (done, len(wrong)) == (run, failures)
        assert all("index.md:" in w for w in wrong)


def test_every_make_target_is_described_and_made_without_files_of_its_name():
    text = text_of(ROOT / "Makefile")
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    wanted = "help demo real test hardening browser-test check size docs wheel-test transformers-test vllm-test bench gpu clean"
    assert targets == set(wanted.split())
    assert set(re.search(r"^\.PHONY: (.*)", text, re.MULTILINE)[1].split()) == targets
    assert all(re.search(rf"^{t}:.*## \w", text, re.MULTILINE) for t in targets)


def test_constraints_pin_everything_exactly_and_fit_the_project():
    lines = [line for line in text_of(ROOT / "constraints.txt").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "no local versions, no paths, no ranges"
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    assert len(pinned) == len(lines)
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    extras = ("dev", "eval", "gguf", "ray", "serve", "docs")
    wanted = [*project["dependencies"], *(w for e in extras for w in project["optional-dependencies"][e])]
    names = {re.match(r"[\w-]+", w)[0].lower() for w in wanted} - {"freemoe"}
    assert names <= pinned


def test_every_extra_has_code_behind_it():
    extras = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    assert set(extras) == {"eval", "gguf", "devices", "math", "ray", "serve", "serve-ray", "dev", "docs"}


def test_the_citation_names_this_version():
    from freemoe import __version__

    found = yaml.safe_load(text_of(ROOT / "CITATION.cff"))
    assert found["version"] == __version__
    assert found["title"].startswith("freemoe")
    assert {"cff-version", "message", "authors"} <= set(found)
