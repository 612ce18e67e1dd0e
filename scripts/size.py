"""How large the project is and how it is named, against ceilings that only ever come down (``make size``).

    python -m scripts.size

A change that needs more room than there is finds it by making something simpler. A ceiling that is far above its figure is to
be lowered to it, in `CEILINGS`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CEILINGS = {
    "lines of src/freemoe": (51_105, 42_000),
    "lines of benchmarks and reproduce": (13_503, 13_000),
    "lines of tests": (47_211, 40_000),
    "one-word names of functions and classes, %": (10, 35),
    "classes defined more than once": (0, 0),
    "functions with 8 or more arguments": (26, 15),
    "private helpers called once": (297, 300),
}
"""Figure -> the most that passes today, and the most that is wanted in the end."""


def trees(*folders: str) -> list[ast.Module]:
    """The modules below some folders."""
    return [
        ast.parse(path.read_text(encoding="utf-8"))
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def lines(*folders: str) -> int:
    """Lines of Python below some folders, as ``wc -l`` counts them."""
    return sum(path.read_bytes().count(b"\n") for folder in folders for path in (ROOT / folder).rglob("*.py"))


def one_word(names: list[str]) -> float:
    """Share of names of one word, in per cent; underscores around a name and dunders count for nothing."""
    plain = [name.strip("_") for name in names if not name.startswith("__")]
    return 100 * sum(len(re.findall("[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)) == 1 for name in plain) / len(plain)


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many arguments a function takes, ``self`` and ``cls`` left out."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def called_once(module: ast.Module) -> int:
    """Private functions of a module that one place in it names."""
    own = [
        n.name for n in module.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("_")
    ]
    named = Counter(n.id for n in ast.walk(module) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return sum(named[name] == 1 for name in own)


def measure() -> dict[str, float]:
    """Every figure of `CEILINGS`."""
    package = trees("src/freemoe")
    nodes = [node for module in package for node in ast.walk(module)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    return {
        "lines of src/freemoe": lines("src/freemoe"),
        "lines of benchmarks and reproduce": lines("benchmarks", "reproduce"),
        "lines of tests": lines("tests"),
        "one-word names of functions and classes, %": one_word([*(f.name for f in functions), *classes]),
        "classes defined more than once": sum(count > 1 for count in Counter(classes).values()),
        "functions with 8 or more arguments": sum(arguments(f) >= 8 for f in functions),
        "private helpers called once": sum(map(called_once, package)),
    }


def main() -> int:
    """Print each figure beside its ceiling; 1 where one is above."""
    found = measure()
    for name, value in found.items():
        ceiling, goal = CEILINGS[name]
        over = "  TOO MUCH" if value > ceiling else ""
        print(f"{name:46} {value:8,.0f}   at most {ceiling:,}, wanted {goal:,}{over}")
    return int(any(value > CEILINGS[name][0] for name, value in found.items()))


if __name__ == "__main__":
    sys.exit(main())
