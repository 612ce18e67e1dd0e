"""Run every code block of the docs, each page in an empty folder of its own, as a reader would: from top to bottom.

    python scripts/docs_blocks.py [PAGE ...]

A block in `bash`, `console` or `python` is run; one of another language is something to read. A block that cannot be run says why in a
comment above it, `<!-- not run: needs a model of your own -->`; the comment stands in the page's source, and the block is
still parsed.
"""

from __future__ import annotations

import ast
import contextlib
import io
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]

RUN = ("bash", "console", "python")
SHELL = RUN[:2]
READ = ("text", "json", "jsonl", "yaml", "toml", "make")
"""Languages of blocks that are only read."""

LIMIT = 900
"""Seconds that one block may take."""

WORKERS = min(4, os.cpu_count() or 1)
"""Pages that are run side by side, each with one thread; a page takes about 2 GB."""

_REASON = re.compile(r"<!-- not run: (\S.*\S) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path  # Where it stands
    line: int  # Of its first fence, counted from 1
    language: str  # What is written behind the fence
    text: str  # Between the fences
    reason: str = ""  # Why it is not run; empty for one that is

    @property
    def commands(self) -> str:
        """What a shell runs: all of it, or of a session with prompts what stands behind them."""
        lines = self.text.splitlines()
        typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return "\n".join(typed or lines) + "\n"

    @property
    def place(self) -> str:
        """``docs/page.md:12``."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = re.fullmatch(r"\s*```(\S*)\s*", lines[at])
        if fence is None:
            at += 1
            continue
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"), len(lines))
        above = _REASON.fullmatch(lines[at - 1].strip()) if at else None
        text = "\n".join(lines[at + 1 : end]) + "\n"
        yield Block(page, at + 1, fence.group(1), text, above.group(1) if above else "")
        at = end + 1


def fault(block: Block) -> str:
    """What is wrong with a block before anything is run; empty for a good one."""
    if block.language not in (*RUN, *READ):
        return f"language {block.language!r}; allowed: {', '.join((*RUN, *READ))}"
    if block.language == "python":
        try:
            ast.parse(block.text)
        except SyntaxError as error:
            return f"no Python: {error}"
    if block.language in SHELL:
        found = subprocess.run(["bash", "-n"], input=block.commands, capture_output=True, text=True, check=False)
        if found.returncode:
            return f"no bash: {found.stderr.strip()}"
    return ""


def run_page(page: Path, folder: Path) -> tuple[int, list[str]]:
    """Run a page's blocks in a folder; Python blocks share their names.

    Returns:
        How many were run, and what failed: place and output. After a failure the rest of the page is not run.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    done = 0
    with contextlib.chdir(folder):
        for block in blocks(page):
            wrong = fault(block)
            if wrong:
                return done, [f"{block.place}: {wrong}"]
            if block.language not in RUN or block.reason:
                continue
            wrong = _run_bash(block) if block.language in SHELL else _run_python(block, names)
            done += 1
            if wrong:
                return done, [f"{block.place} failed:\n{wrong}"]
    return done, []


def _run_bash(block: Block) -> str:
    # The commands of the environment that runs this, whatever the shell's own path says.
    # Benchmarks and the papers' tables are run from a clone.
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    script = f"set -euo pipefail\n{block.commands}"
    try:
        found = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env=environment,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT} seconds"
    return "" if found.returncode == 0 else (found.stdout + found.stderr)[-3000:]


def _run_python(block: Block, names: dict[str, Any]) -> str:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            exec(compile(block.text, block.place, "exec"), names)
    except Exception:
        return f"{said.getvalue()[-2000:]}{traceback.format_exc()}"
    return ""


def _timed(page: Path) -> tuple[int, list[str], float]:
    """A page run in an empty folder: how many blocks, what failed, seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="freemoe-docs-") as folder:
        done, wrong = run_page(page, Path(folder))
    return done, wrong, time.monotonic() - start


def main(pages: list[Path]) -> int:
    """Run pages, as many side by side as there are cores; one line each. Returns the number of failures."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The cores are taken by pages.
    os.environ["OMP_NUM_THREADS"] = "1"
    failures: list[str] = []
    began, total = time.monotonic(), 0
    with ProcessPoolExecutor(min(WORKERS, len(pages)), multiprocessing.get_context("spawn")) as pool:
        for page, (done, wrong, seconds) in zip(pages, pool.map(_timed, pages), strict=True):
            skipped = sum(b.language in RUN and bool(b.reason) for b in blocks(page))
            total, failures = total + done, failures + wrong
            if done or skipped or wrong:
                print(
                    f"{page.relative_to(ROOT)}: {done} run, {skipped} not run, {len(wrong)} failed, {seconds:.0f} s",
                    flush=True,
                )
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{total} blocks run, {len(failures)} failed, {time.monotonic() - began:.0f} s")
    return len(failures)


if __name__ == "__main__":
    sys.exit(1 if main([Path(p).resolve() for p in sys.argv[1:]] or PAGES) else 0)
