"""Private and moving names of transformers, lm-eval and PEFT stand in compat, and nowhere else."""

import ast
import re

import pytest

from tests.test_architecture import BESIDE, HOOKS_BY_HAND, MODULES, PACKAGE, ROOT, imports, parsed, room

# What transformers and lm-eval document for others; the rest of them, and PEFT, is asked for by compat alone.
DOCUMENTED = {
    "transformers": ("", "utils", "modeling_outputs"),
    "lm_eval": ("api.instance", "api.model", "api.registry"),
    "peft": (),
}
# Copies of these lie in exported folders, where there is no freemoe.
COPIED = ("tomoe/modeling.py", "tomoe/modules.py")
# Private names of torch and Python that have stood for as long as freemoe's oldest torch and longer.
SETTLED = ("_parameters", "_buffers", "_version", "_exit")
# lm-eval's models define it, ours too; that does not make lm-eval's ours.
THEIRS = ("_loglikelihood_tokens",)


def undocumented(tree):
    """Modules of transformers, lm-eval and PEFT that a module imports though they may move."""
    for module, _, line in imports(tree):
        package, _, inside = module.partition(".")
        if package in DOCUMENTED and inside not in DOCUMENTED[package]:
            yield module, line


def own_names(tree):
    """Names that a module gives to what it defines, attributes of its own objects included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def private_names(tree):
    """Private attributes that a module asks an object for, by a dot or by getattr and its like."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "super()"):
            name = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = getattr(node.args[1], "value", None)
        if isinstance(name, str) and re.fullmatch(r"_[a-zA-Z]\w*", name):
            yield name, node.lineno


def foreign_names(tree, known):
    """What a module uses of other packages though it is private there or may move; ``known``: names of our own."""
    # torch's lists of hooks have an owner and a rule of their own.
    private = [(n, line) for n, line in private_names(tree) if n not in known and not HOOKS_BY_HAND.fullmatch(n)]
    return [f"line {line}: {name}" for name, line in (*undocumented(tree), *private)]


def in_compat(path):
    return room(path) == "compat" if path in MODULES else path.stem == "compat"


def test_private_names_of_other_packages_stay_in_compat():
    trees = {path: parsed(path) for path in [*MODULES, *BESIDE]}
    ours = {name for path, tree in trees.items() if not in_compat(path) for name in own_names(tree)}
    known = (ours | set(SETTLED)) - set(THEIRS)
    found = {}
    for path, tree in trees.items():
        if in_compat(path) or (path in MODULES and str(path.relative_to(PACKAGE)) in COPIED):
            continue
        if wrong := foreign_names(tree, known):
            found[str(path.relative_to(ROOT))] = wrong
    assert not found, "give it a function in freemoe.compat"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("model.config._attn_implementation", True),
        ("getattr(config, '_attn_implementation', None)", True),
        ("from transformers.pytorch_utils import Conv1D", True),
        ("import lm_eval.tasks", True),
        ("from lm_eval.utils import env", True),
        ("from peft import LoraConfig", True),
        ("experts._apply_gate = listen", True),
        ("backend._loglikelihood_tokens(rows)", True),
        ("from transformers import AutoModelForCausalLM", False),
        ("from lm_eval.api.instance import Instance", False),
        ("self._loglikelihood_tokens(rows)", False),
        ("undo._saved.append(row)", False),
        ("getattr(config, 'sliding_window', None)", False),
        ("from freemoe.compat.transformers import gate_of", False),
    ],
)
def test_the_look_for_private_names_itself(code, expected):
    assert bool(foreign_names(ast.parse(code), {"_saved"})) is expected
