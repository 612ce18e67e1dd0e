"""The rules of the house: imports point down, help is quick, files are small, public names are described."""

import ast
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import freemoe
from freemoe.domain_experts.purify.methods import METHODS
from freemoe.domain_experts.rank.importance import METRICS as METRIC_REGISTRY
from freemoe.domain_experts.recipe import METRICS, PURIFICATIONS
from freemoe.domain_experts.recipe import SEARCHES as SEARCH_NAMES
from freemoe.domain_experts.select.search import SEARCHES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "freemoe"
MODULES = sorted(PACKAGE.rglob("*.py"))
BESIDE = sorted(p for house in ("benchmarks", "reproduce") for p in (ROOT / house).rglob("*.py"))
"""What stands beside the package and does not ship."""

# Lowest first. A room may import from rooms of its own floor (but see SYSTEMS) and from the floors below.
FLOORS = (
    ("core",),
    ("compat", "distributed", "systems"),
    ("recipes", "results", "hub"),
    ("models", "text", "kernels"),
    ("training",),
    ("evals",),
    ("report",),
    ("domain_experts", "tomoe", "hookmoe"),
    ("artefacts", "lm_eval"),
    ("serve",),
    ("cli", "__main__"),
)
SYSTEMS = ("domain_experts", "tomoe", "hookmoe")
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FREE = "assets"  # anyone may import it; it imports nothing of ours
LAZY = "__init__"  # the public names; no room imports from it
HEAVY = ("torch", "transformers", "lm_eval", "sklearn", "scipy", "matplotlib", "datasets")

LONGEST = 400
# File -> why it is longer.
LONGER = {}

MOST_FILES = 12
# Folder -> why it holds more.
FULLER = {"src/freemoe/cli": "one file per command"}

LONGEST_FUNCTION = 60

HOOKS_BY_HAND = re.compile(r"register_(\w+_)?hook|_(forward|backward)_(pre_)?hooks")


@cache
def parsed(path):
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def room(path):
    """The room a module stands in: the first name below the package."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(tree):
    """What a module imports, wherever in the file: the module, a name of it where one is taken, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; name the room in full"
            yield from ((node.module, alias.name, node.lineno) for alias in node.names)


def imported_rooms(tree):
    """Every room of ours that a module imports, with its line."""
    for module, name, line in imports(tree):
        package, _, inside = f"{module}.{name}".rstrip(".").partition(".")
        if package == "freemoe":
            yield inside.partition(".")[0], line


def forbidden(here, there):
    """Whether a module of one room must not import from another."""
    if there in ("", here, FREE) or here == LAZY:
        return False
    if here == FREE or there not in FLOOR:
        return True
    return FLOOR[there] > FLOOR[here] or (here in SYSTEMS and there in SYSTEMS)


def run_python(code):
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ids(paths):
    return [str(p.relative_to(ROOT)) for p in paths]


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_imports_point_down(path):
    here = room(path)
    assert here in FLOOR or here in (FREE, LAZY), f"{here!r} has no floor yet: give it one in FLOORS"
    tree = parsed(path)
    wrong = [f"line {line}: {here} imports {there}" for there, line in imported_rooms(tree) if forbidden(here, there)]
    assert not wrong, "\n".join(wrong)


DOWN = (
    "recipes core",
    "hub compat",
    "evals models",
    "tomoe training",
    "domain_experts evals",
    "cli report",
    "models assets",
)
UP = ("hub models", "core recipes", "core models", "models evals", "training evals", "report cli", "assets core")
ASIDE = ("domain_experts tomoe", "hookmoe domain_experts", "cli somewhere")


@pytest.mark.parametrize("rooms", [*DOWN, *UP, *ASIDE])
def test_the_rule_itself(rooms):
    assert forbidden(*rooms.split()) is (rooms not in DOWN)


def module_name(path):
    """As it is imported."""
    parts = ("freemoe", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def imported(tree, known):
    """Modules of ours that a module imports, wherever in the file and for whatever reason, in order."""
    pairs = [(f"{module}.{name}", module) for module, name, _ in imports(tree)]
    found = dict.fromkeys(inner if inner in known else module for inner, module in pairs)
    return [name for name in found if name in known]


def circles(graph):
    """Modules that lead back to themselves, one way round each."""
    state = {}
    found = []

    def visit(name, way):
        state[name] = 1
        for other in graph[name]:
            if state.get(other) == 1:
                found.append([*way[way.index(other) :], other])
            elif other not in state:
                visit(other, [*way, other])
        state[name] = 2

    for name in graph:
        if name not in state:
            visit(name, [name])
    return found


def test_no_module_leads_back_to_itself():
    known = {module_name(path) for path in MODULES}
    graph = {module_name(p): imported(parsed(p), known) for p in MODULES}
    assert not [" -> ".join(circle) for circle in circles(graph)]


def test_the_look_for_circles_itself():
    assert circles({"a": ["b"], "b": ["c"], "c": []}) == []
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"]}) == [["b", "c", "b"]]
    code = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import X\ndef f():\n    from p import b"
    assert imported(ast.parse(code), {"p", "p.a", "p.b"}) == ["p.a", "p.b"]


def test_the_package_knows_nothing_of_what_stands_beside_it():
    for path in MODULES:
        packages = {module.partition(".")[0] for module, *_ in imports(parsed(path))}
        assert not packages & {"benchmarks", "reproduce", "tests", "scripts"}, path


def test_the_wheel_holds_the_package_alone(tmp_path):
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(wheel) as held:
        folders = {name.partition("/")[0] for name in held.namelist()}
    assert folders == {"freemoe", f"freemoe-{freemoe.__version__}.dist-info"}


def test_importing_freemoe_loads_nothing_heavy():
    loaded = run_python("import sys, freemoe; print(*sorted({m.split('.')[0] for m in sys.modules}))").split()
    assert not set(HEAVY) & set(loaded)


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], ["--version"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments):
    code = f"""
import sys
sys.argv = ["freemoe", *{arguments!r}]
from freemoe.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("LOADED", *sorted({{m.split(".")[0] for m in sys.modules}}))
"""
    loaded = run_python(code).rsplit("LOADED", 1)[1].split()
    assert not set(HEAVY) & set(loaded)


def test_files_are_small():
    folders = ("src", "benchmarks", "reproduce", "tests", "scripts")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    long = {name: lines for name, lines in lengths.items() if lines > LONGEST and name not in LONGER}
    assert not long, f"over {LONGEST} lines without a reason in LONGER: {long}"


def test_folders_are_small():
    folders = {str(p.parent.relative_to(ROOT)) for p in [*MODULES, *BESIDE]}
    counts = {f: len([p for p in (ROOT / f).glob("*.py") if p.stem != "__init__"]) for f in sorted(folders)}
    full = {folder: count for folder, count in counts.items() if count > MOST_FILES and folder not in FULLER}
    assert not full, f"over {MOST_FILES} files: make rooms in it"
    assert not [p for p in MODULES if p.stem in ("utils", "util", "helpers", "misc")], "no room for leftovers"


def long_functions(path):
    """Functions over `LONGEST_FUNCTION` lines, their docstrings not counted."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            about = node.body[0] if ast.get_docstring(node) else None
            told = (about.end_lineno or 0) - about.lineno + 1 if about else 0
            if (node.end_lineno or 0) - node.lineno + 1 - told > LONGEST_FUNCTION:
                found.append(node.name)
    return found


def test_functions_are_short():
    long = {str(p.relative_to(ROOT)): found for p in [*MODULES, *BESIDE] if (found := long_functions(p))}
    assert not long


def undescribed(path):
    """Public functions, classes and methods without a docstring; an attribute may stand in its class's."""
    found = []

    def look(body, prefix, around=""):
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if node.name.startswith("_") or "overload" in map(ast.unparse, node.decorator_list):
                continue
            about = ast.get_docstring(node)
            if about is None and f"\n    {node.name}: " not in around:
                found.append(f"{prefix}{node.name} (line {node.lineno})")
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{node.name}.", about or "")

    look(parsed(path).body, "")
    return found


def test_public_names_are_described():
    missing = {str(p.relative_to(ROOT)): found for p in [*MODULES, *BESIDE] if (found := undescribed(p))}
    assert not missing


@pytest.mark.parametrize("name", freemoe.__all__)
def test_public_names_resolve(name):
    assert getattr(freemoe, name) is not None
    assert name in dir(freemoe)


def test_a_wrong_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"nothing.*it has .*build"):
        _ = freemoe.nothing


def test_names_that_recipes_allow_are_the_registries():
    assert sorted(METRICS) == sorted(METRIC_REGISTRY.names())
    assert sorted(SEARCH_NAMES) == sorted(SEARCHES.names())
    assert sorted(PURIFICATIONS) == sorted(["auto", *METHODS.names()])


def hooks_by_hand(tree):
    """Lines that name one of torch's own ways to register a hook, or the places where torch keeps them, or exchange a forward."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if HOOKS_BY_HAND.fullmatch(name):
                found.append(node.lineno)
            case ast.Attribute(attr="forward", ctx=to) | ast.Subscript(slice=ast.Constant("forward"), ctx=to):
                found += [] if isinstance(to, ast.Load) else [node.lineno]
            case ast.Call(func=ast.Attribute(attr="pop"), args=[ast.Constant("forward"), *_]):
                found.append(node.lineno)
    return found


def test_hooks_stay_with_the_models():
    # What registers a hook by hand has to remember to remove it, also after an error.
    others = [*(path for path in MODULES if room(path) != "models"), *BESIDE]
    found = {str(p): lines for p in others if (lines := hooks_by_hand(parsed(p)))}
    assert not found, "take freemoe.models.hooks"
    assert hooks_by_hand(ast.parse((PACKAGE / "models" / "hooks.py").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("layer.register_forward_hook(see)", True),
        ("stack.callback(layer.q.register_forward_pre_hook(see).remove)", True),
        ("register = x.register_hook", True),
        ("w.register_post_accumulate_grad_hook(see)", True),
        ("m.register_full_backward_hook(see)", True),
        ("gate._forward_hooks.clear()", True),
        ("layer.forward = partial(run, layer.forward)", True),
        ("vars(layer)['forward'] = run", True),
        ("del layer.__dict__['forward']", True),
        ("layer.__dict__.pop('forward', None)", True),
        ("stack.enter_context(after(layer, see))", False),
        ("own = layer.forward", False),
        ("register_model('freemoe')", False),
        ("self.register_buffer('mask', mask)", False),
    ],
)
def test_the_look_for_hooks_itself(code, expected):
    assert bool(hooks_by_hand(ast.parse(code))) is expected


COMPUTES = ("models", "kernels", "hookmoe/decoding", "tomoe/modules.py", "serve/engine/acting.py")
CLOCKS = {"models/precision.py": "decided once per run, and written down in its journal and its result"}


def test_no_way_to_compute_is_chosen_by_a_stopwatch():
    # The same input is computed alike in every run.
    for path in MODULES:
        name = str(path.relative_to(PACKAGE))
        if name.startswith(COMPUTES) and name not in CLOCKS:
            clocks = {module for module, *_ in imports(parsed(path))} & {"time", "timeit"}
            assert not clocks, f"{name} reads a clock: choose by shapes and types, or write down what was chosen"


def test_indices_of_masks_stay_with_the_models():
    # As int64 they take 64 times what a mask's bits do; elsewhere masks are joined, picked with and counted.
    for path in MODULES:
        if room(path) == "models":
            continue
        calls = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Call)]
        found = [n.lineno for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == "indices"]
        assert not found, f"{path} asks a mask for its indices in line {found}."
