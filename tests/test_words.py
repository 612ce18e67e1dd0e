"""Names and docstrings say something: no participle for a parameter, no docstring of four words, no two classes of one name."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "freemoe"
TREES = {str(p.relative_to(PACKAGE)): ast.parse(p.read_text(encoding="utf-8")) for p in sorted(PACKAGE.rglob("*.py"))}

# Which thing it is, they do not say: no parameter and no attribute is called so, with an underscore before it or without.
BANNED = {"found", "told", "asked", "said", "kept", "held", "own"}
# Name -> why it stays.
STAYS = {"asked of MissedBudget": "a key of result.json"}

LEAST_WORDS = 5


def banned_names(tree):
    """Parameters, fields and attributes that are called by a word of `BANNED`."""
    names = []
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.append(name)
            case ast.ClassDef(name=owner, body=body):
                fields = [part.target for part in body if isinstance(part, ast.AnnAssign)]
                names += [f"{field.id} of {owner}" for field in fields if isinstance(field, ast.Name)]
    return [name for name in names if name.split()[0].lstrip("_") in BANNED and name not in STAYS]


def test_parameters_and_attributes_say_what_they_are():
    banned = {file: names for file, tree in TREES.items() if (names := banned_names(tree))}
    assert not banned, "name it by what it is"
    code = "class A:\n    told: int\n    def f(self, kept, *own, x=lambda said: 0):\n        self._held, found = kept"
    assert sorted(banned_names(ast.parse(code))) == ["_held", "kept", "own", "said", "told of A"]


def test_docstrings_say_something():
    described = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    nodes = [(file, node) for file, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, described)]
    texts = [(file, ast.get_docstring(node)) for file, node in nodes]
    short = [(file, text) for file, text in texts if text is not None and len(text.split()) < LEAST_WORDS]
    assert not short, "write a sentence that a reader needs, or none where the name says it"


def test_no_two_classes_have_one_name():
    names = Counter(node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert not {name for name, count in names.items() if count > 1}
