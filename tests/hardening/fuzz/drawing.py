"""Hypothesis strategies that several kinds share."""

import copy
import functools
import json
import warnings

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import NonInteractiveExampleWarning

from tests.hardening.fuzz.editing import places, read_header

NUMBERS = (-1, 0, 1, 2, 3, 7, 64, 100_001, 2**31, 2**63, 2**64, -(2**63), 10**30)
FLOATS = (0.0, -0.0, 1e-9, 0.05, 0.5, 0.999999, 1.0, 1.5, -1.5, 3e38, 5e-324, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", " ", "0", "1", "-1", "1e3", "nan", "yes", "null", "base", "auto", "a|b", "a+b", "a+b&", "base:", "base:x"),
    *("x\ny", "../../x", "/dev/null", "C:\\x", "\0", "a\0b", "\ud800", "\udcff", "\x1b[2J\x1b[31mred"),
    *("<script>alert(1)</script>", "{{7*7}}", "%s%n", "é" * 300, "text:", "hf:", "::", "demo:math", "\u202eabc"),
    *("\u2028", "\ufeff", "x" * 5000, "[1, 2]", "{}", "é", "日本", "🙂", "a\rb"),
)
SHAPES = ([None], [[]], [10**30], [True, False], {}, {"name": {}}, {"a": None})
"""Lists and mappings where something else stands, and with what nobody puts into one."""

TEMPLATES = (
    *("{{ 'a' * 10**10 }}", "{{ lipsum(10**8) }}", "{{ '%1000000000d' | format(1) }}", "{{ 1 / 0 }}", "{% if"),
    "{{ x.y.z }}",
    "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
    "{{ messages.__class__.__mro__ }}",
)
"""Chat templates that take all time or memory, write without end, or fail."""


@functools.cache
def hostile():
    """A value that nobody wanted: of every JSON type, small, huge, not a number, not text."""
    scalars = st.one_of(
        st.sampled_from([None, True, False]),
        st.sampled_from(NUMBERS),
        st.sampled_from(FLOATS),
        st.sampled_from(TEXTS),
        st.integers(-300, 300),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=12),
        st.sampled_from(SHAPES).map(copy.deepcopy),  # whoever draws one may change it
    )
    inner = st.recursive(
        scalars,
        lambda s: st.one_of(st.lists(s, max_size=4), st.dictionaries(st.text(max_size=6), s, max_size=3)),
        max_leaves=6,
    )
    return st.one_of(scalars, scalars, inner, st.sampled_from([60, 70, 150, 900]).map(deep))


def rarely(times):
    """Once in so many times; drawn in the middle, as the ends of a range are what hypothesis likes best."""
    return st.integers(0, times).map(lambda number: number == times // 2)


def deep(levels):
    """Lists in one another."""
    value = []
    for _ in range(levels):
        value = [value]
    return value


def near(value):
    """A value like another, or a hostile one."""
    if isinstance(value, bool):
        return _mostly(st.just(not value))
    if isinstance(value, int | float):
        return _mostly(st.sampled_from([value + 1, value - 1, value * 2, -value, value / 2, value * 1.5]))
    if isinstance(value, str):
        shorter = [value[: len(value) // 2], value + "x", value.upper(), value[::-1], value.replace("0", "1")]
        return _mostly(st.sampled_from(shorter))
    if isinstance(value, list) and value:
        changed = [value[:-1], [*value, value[-1]], value[::-1], [*value, None]]
        return _mostly(st.sampled_from(changed))
    return hostile()


def _mostly(sound):
    """What may be accepted, three times of four: only what is accepted can be wrong."""
    return st.one_of(sound, sound, sound, hostile())


def spliced(draw, raw, pieces, times, most):
    """A text or bytes, once in so many times with a piece or two in it, each over ``most`` characters at most."""
    for _ in range(draw(st.integers(1, 2)) if draw(rarely(times)) else 0):
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(pieces) + raw[at + draw(st.integers(0, most)) :]
    return raw


def json_edits(folder, file):
    """An edit of a JSON file."""
    found = [(list(path), held) for path, held in places(json.loads((folder / file).read_text(encoding="utf-8")))]
    # As many at the top as below, where lists of hundreds of numbers are.
    top = [one for one in found if len(one[0]) <= 2]
    pick = st.one_of(st.sampled_from(top), st.sampled_from(found))
    change = pick.flatmap(lambda one: st.builds(lambda to: {"file": file, "set": one[0], "to": to}, near(one[1])))
    drop = pick.map(lambda one: {"file": file, "drop": one[0]})
    names = st.one_of(st.sampled_from(TEXTS), st.text(max_size=8))
    add = st.builds(
        lambda one, name, to: {"file": file, "set": [*one[0][:-1], name], "to": to},
        st.sampled_from([one for one in found if isinstance(one[0][-1], str)]),
        names,
        hostile(),
    )
    return st.one_of(change, change, change, drop, add)


def wild_edits(table):
    """An edit that sets what a table names, file and path, to one of its values or to a hostile one."""

    def of(where):
        file, *path = where
        value = st.one_of(st.sampled_from(table[where]).map(copy.deepcopy), hostile())
        return value.map(lambda to: {"file": file, "set": [int(p) if p.isdigit() else p for p in path], "to": to})

    return st.one_of(*map(of, table))


def tensor_edits(folder, file):
    """An edit of a safetensors file."""
    header, _ = read_header((folder / file).read_bytes())
    names = sorted(name for name in header if name != "__metadata__")
    pick = st.sampled_from(names)
    numbers = st.one_of(st.sampled_from(NUMBERS[:9]), st.sampled_from(FLOATS), st.integers(0, 255), st.floats(-4, 4))
    value = st.builds(
        lambda name, at, to: {"file": file, "tensor": name, "at": at, "to": to},
        pick,
        st.one_of(st.integers(0, 2**12), st.none()),
        numbers,
    )
    types = st.sampled_from(["F32", "F16", "BF16", "F64", "I64", "I32", "I16", "U16", "U8", "BOOL", "F8_E4M3", "X"])
    shapes = st.lists(st.sampled_from([0, 1, 2, 8, 16, 24, 2**31, 2**62, -1]), max_size=4)
    offsets = st.lists(st.sampled_from([0, 4, 64, 2**20, -1]), max_size=3)
    fields = st.one_of(
        st.tuples(st.just("dtype"), types),
        st.tuples(st.just("shape"), st.one_of(shapes, hostile())),
        st.tuples(st.just("data_offsets"), st.one_of(offsets, hostile())),
        st.tuples(st.just("name"), st.one_of(pick, st.text(max_size=8), pick.map(lambda name: name + "x"))),
        st.just((None, None)),
    )
    told = st.builds(
        lambda name, field: {"file": file, "header": name, "field": field[0], "to": field[1]}, pick, fields
    )
    return st.one_of(value, value, told)


def byte_edits(folder, file):
    """An edit of any file."""
    size = (folder / file).stat().st_size
    cut = st.builds(lambda n: {"file": file, "cut": n}, st.integers(0, size))
    put = st.builds(
        lambda at, text: {"file": file, "put": [at, text]},
        st.one_of(st.integers(0, min(size, 64)), st.integers(0, size)),
        st.text(alphabet=st.characters(max_codepoint=255), min_size=1, max_size=8),
    )
    return st.one_of(cut, put, st.just({"file": file, "remove": True}))


def draw(strategy, count, number):
    """So many examples of a strategy, the same for the same seed and hypothesis."""
    found = []

    @seed(number)
    @settings(
        max_examples=count, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(strategy)
    def collect(example):
        found.append(json.loads(json.dumps(example)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonInteractiveExampleWarning)
        collect()
    return found[:count]
