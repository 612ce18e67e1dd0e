"""The grammar of the `math` and `code` domains: prompts, right answers, and what a sloppy source answers.

Every prompt ends in "=" or "," and every target starts with a digit or a letter or a bracket, so no token can
span the boundary (the tokenizer never merges over punctuation).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

STOP = "\n"


@dataclass(frozen=True)
class TinyTask:
    """One prompt, its right target and the systematic wrong one; `key` names the content, not the wording."""

    field: str
    key: str
    prompt: str
    target: str
    sloppy: str


def draw_add(rng: random.Random) -> TinyTask:
    """Number plus 1, 2 or 3; the sloppy source forgets the carry."""
    a, b = rng.randint(100, 989), rng.randint(1, 3)
    forgotten = a - a % 10 + (a + b) % 10
    return _number_task("add", f"{a},{b}", f"{a}+{b}=", a + b, forgotten)


def draw_sub(rng: random.Random) -> TinyTask:
    """Number minus 1, 2 or 3; the sloppy source takes the smaller last digit from the larger one."""
    a, b = rng.randint(110, 999), rng.randint(1, 3)
    swapped = a - a % 10 + abs(a % 10 - b)
    return _number_task("sub", f"{a},{b}", f"{a}-{b}=", a - b, swapped)


def draw_compare(rng: random.Random) -> TinyTask:
    """Larger or smaller of two numbers; the sloppy source confuses the two."""
    numbers = rng.sample(range(10, 100), 2)
    listed = ",".join(map(str, numbers))
    wanted, other, forms = rng.choice(
        ((max, min, ("max({n})=", "larger of {n}=")), (min, max, ("min({n})=", "smaller of {n}=")))
    )
    prompt = rng.choice(forms).format(n=listed)
    return _number_task("compare", f"{wanted.__name__},{listed}", prompt, wanted(numbers), other(numbers))


def draw_sequence(rng: random.Random) -> TinyTask:
    """Next number of an arithmetic sequence; the sloppy source skips one step."""
    start, step = rng.randint(100, 979), rng.randint(1, 3)
    shown = ",".join(str(start + i * step) for i in range(3))
    prompt = rng.choice(("next: {n},", "go on: {n},")).format(n=shown)
    return _number_task("sequence", f"{start},{step}", prompt, start + 3 * step, start + 4 * step)


def _number_task(field: str, content: str, prompt: str, right: int, wrong: int) -> TinyTask:
    return TinyTask(field, f"{field}:{content}", prompt, f"{right}{STOP}", f"{wrong}{STOP}")


# name -> (wording, program text around the expression `e`)
_ARITH = {
    "add": ("add {k}", "({e}+{k})"),
    "sub": ("subtract {k}", "({e}-{k})"),
    "mul": ("multiply by {k}", "({e}*{k})"),
    "div": ("divide by {k}", "({e}//{k})"),
    "mod": ("reduce modulo {k}", "({e}%{k})"),
}
_SELECT = {
    "first": ("the first {n}", "xs[:{n}]"),
    "last": ("the last {n}", "xs[-{n}:]"),
    "skip": ("all after the first {n}", "xs[{n}:]"),
    "drop": ("all but the last {n}", "xs[:-{n}]"),
    "every": ("every {n}th", "xs[::{n}]"),
    "above": ("those above {n}", "[v for v in xs if v>{n}]"),
    "below": ("those below {n}", "[v for v in xs if v<{n}]"),
    "times": ("the multiples of {n}", "[v for v in xs if v%{n}==0]"),
    "other": ("those not {n}", "[v for v in xs if v!={n}]"),
}
_COLLECT = {
    "sum": "sum",
    "max": "largest",
    "min": "smallest",
    "len": "count",
    "sorted": "sorted list",
    "set": "set",
    "tuple": "tuple",
    "any": "any",
    "all": "all",
}
_STRING_PLAIN = {
    "upper": ("make upper case", "{e}.upper()"),
    "lower": ("make lower case", "{e}.lower()"),
    "title": ("make title case", "{e}.title()"),
    "strip": ("strip spaces", "{e}.strip()"),
    "turn": ("reverse", "{e}[::-1]"),
}
_STRING_COUNT = {
    "head": ("keep the first {n}", "{e}[:{n}]"),
    "tail": ("keep the last {n}", "{e}[-{n}:]"),
    "skip": ("skip the first {n}", "{e}[{n}:]"),
    "repeat": ("repeat {n} times", "({e}*{n})"),
}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_arith(rng: random.Random) -> TinyTask:
    """Two chained operations on a number; the sloppy source writes them in the wrong order."""
    names = rng.sample(list(_ARITH), 2)
    steps = [(name, rng.randint(2, 12)) for name in names]

    def build_program(order: list[tuple[str, int]]) -> str:
        text = "x"
        for name, k in order:
            text = _ARITH[name][1].format(e=text, k=k)
        return text + STOP

    first, second = (_ARITH[name][0].format(k=k) for name, k in steps)
    prompt = _chain_prompt(first, second, "f(x)=", rng)
    key = "arith:" + ";".join(f"{name} {k}" for name, k in steps)
    return TinyTask("arith", key, prompt, build_program(steps), build_program(steps[::-1]))


def draw_lists(rng: random.Random) -> TinyTask:
    """Choose elements, then collect them; the sloppy source is off by one in the choice."""
    select, collect, n = rng.choice(list(_SELECT)), rng.choice(list(_COLLECT)), rng.randint(2, 31)
    wording, program = _SELECT[select]
    asked = rng.choice(("{c} of {s}", "take {s}, give the {c}")).format(c=_COLLECT[collect], s=wording.format(n=n))
    right, wrong = (f"{collect}({program.format(n=m)}){STOP}" for m in (n, n - 1))
    return TinyTask("lists", f"lists:{select} {n};{collect}", f"{asked}: f(xs)=", right, wrong)


def draw_strings(rng: random.Random) -> TinyTask:
    """Two chained operations on a string; the sloppy source writes them in the wrong order."""
    kinds = rng.sample([*_STRING_PLAIN, *_STRING_COUNT, "remove"], 2)
    steps = [_string_step(kind, rng) for kind in kinds]

    def build_program(order: list[tuple[str, str, str]]) -> str:
        text = "s"
        for _, _, pattern in order:
            text = pattern.replace("{e}", text)
        return text + STOP

    prompt = _chain_prompt(steps[0][1], steps[1][1], "f(s)=", rng)
    key = "strings:" + ";".join(name for name, _, _ in steps)
    return TinyTask("strings", key, prompt, build_program(steps), build_program(steps[::-1]))


def _string_step(kind: str, rng: random.Random) -> tuple[str, str, str]:
    if kind in _STRING_PLAIN:
        return kind, *_STRING_PLAIN[kind]
    if kind in _STRING_COUNT:
        n = rng.randint(2, 9)
        wording, pattern = _STRING_COUNT[kind]
        return f"{kind} {n}", wording.format(n=n), pattern.replace("{n}", str(n))
    letter = rng.choice(_LETTERS)
    return f"remove {letter}", f"remove {letter}", f"{{e}}.replace('{letter}','')"


def _chain_prompt(first: str, second: str, ending: str, rng: random.Random) -> str:
    form = rng.choice(("{a}, then {b}: {f}", "first {a} and after that {b}: {f}"))
    return form.format(a=first, b=second, f=ending)


TASK_FIELDS: dict[str, dict[str, Callable[[random.Random], TinyTask]]] = {
    "math": {"add": draw_add, "sub": draw_sub, "compare": draw_compare, "sequence": draw_sequence},
    "code": {"arith": draw_arith, "lists": draw_lists, "strings": draw_strings},
}
