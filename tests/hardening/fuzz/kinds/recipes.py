"""Recipes as YAML.

Accepted is a recipe that is what its text says: every value is there as it was written, no key is unknown or there twice, every
number is one, and written again it is the same.
"""

import json
import math

import yaml
from hypothesis import strategies as st

from freemoe import recipes
from tests.hardening.fuzz.case import require
from tests.hardening.fuzz.drawing import TEXTS, near, rarely, spliced
from tests.hardening.fuzz.editing import holder_of, places

FILE = "recipe.yaml"

_BEGUN = {
    "build": {"command": "build", "model": "freemoe-demo", "domains": {"math": ["demo:math"]}},
    "eval": {"command": "eval", "artefact": "freemoe-demo", "domains": {"math": ["demo:math"]}},
    "convert": {"command": "convert", "model": "freemoe-demo", "text": ["a.txt"]},
    "trim": {"command": "trim", "model": "freemoe-demo-moe", "text": "a.txt"},
}


def whole(command):
    """A sound recipe with every field written out."""
    return recipes.recipe_from(_BEGUN[command]).model_dump(mode="json")


def strategy(material):
    """The text of a recipe: fields of a sound one changed, then maybe some characters of its text."""

    @st.composite
    def texts(draw):
        data = json.loads(json.dumps(whole(draw(st.sampled_from(sorted(_BEGUN))))))
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
            found = list(places(data))
            numbers = [one for one in found if isinstance(one[1], int | float)]
            path, held = draw(st.sampled_from(found if draw(rarely(3)) or not numbers else numbers))
            holder = holder_of(data, path)
            if draw(rarely(12)):
                del holder[path[-1]]
            elif not draw(rarely(12)) or not isinstance(path[-1], str):
                holder[path[-1]] = draw(near(held))
            else:
                holder[draw(st.one_of(st.sampled_from(TEXTS), st.just(path[-1] + "s"), st.text(max_size=6)))] = held
        text = spliced(draw, _dumped(data), st.sampled_from(_INSERTS), 5, 12)
        if draw(rarely(20)) and (lines := text.splitlines(keepends=True)):
            # The same key once more, with another value.
            line = draw(st.sampled_from(lines))
            text += line.partition(":")[0] + ": 1\n"
        return {"text": text}

    return texts()


_INSERTS = (
    *("\n", ": ", "- ", "&a ", "*a", "!!python/object/apply:os.system ", "!!binary ", *"{[]\t#'\"", "? ", "| ", "<<: "),
    *("---\n", "...\n", *"\x00\ufeff\x1bé%@", "0x1F", "1_000", "1e3", ".inf", ".nan", "2024-01-01", "1:30", "yes", "~"),
    *("[" * 100, "{a: " * 80, "&a [*a]", "12345678901234567890"),
)


def _dumped(data):
    try:
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    except (yaml.YAMLError, ValueError, RecursionError):
        return json.dumps(data)


def attempt(what, material, folder):
    """Read a recipe, and hold it against its text."""
    path = folder / FILE
    path.write_bytes(what["text"].encode("utf-8", "surrogatepass"))
    recipe = recipes.load_recipe(path)
    said = recipe.model_dump(mode="json")
    node = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    _require_once(node)
    _require_same(yaml.safe_load(path.read_text(encoding="utf-8-sig")), said, "")
    for place, value in places(said):
        require(not isinstance(value, float) or math.isfinite(value), f"{place} is {value}")
    bands = getattr(recipe, "bands", None)
    if bands is not None:
        require(len(bands.band_edges()) <= 1_000_000, f"a grid of {len(bands.band_edges())} bands")
    again = folder / "again.yaml"
    again.write_text(recipes.dump(recipe), encoding="utf-8")
    require(recipes.load_recipe(again) == recipe, "written again it is another recipe")


def _require_once(node):
    seen, parts = set(), [node]
    while parts:
        part = parts.pop()
        require(id(part) not in seen or not part.value, "an alias was followed")
        seen.add(id(part))
        if isinstance(part, yaml.MappingNode):
            keys = [key.value for key, _ in part.value]
            require(len(set(map(str, keys))) == len(keys), f"a key stands there twice: {keys}")
            parts += [child for pair in part.value for child in pair]
        elif isinstance(part, yaml.SequenceNode):
            parts += part.value


def _require_same(wanted, said, path):
    """Every value of the text stands in the recipe: as it is, or as the same number or list in words."""
    if isinstance(wanted, dict):
        require(isinstance(said, dict), f"{path}: a mapping became {said!r}")
        for key, value in wanted.items():
            require(key in said, f"{path}.{key} was read as nothing")
            _require_same(value, said[key], f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(said, list):
        require(len(wanted) == len(said), f"{path}: {wanted!r} became {said!r}")
        for number, (one, other) in enumerate(zip(wanted, said, strict=True)):
            _require_same(one, other, f"{path}.{number}")
    else:
        require(_means(wanted, said), f"{path}: {wanted!r} became {said!r}")


def _means(wanted, said):
    if isinstance(wanted, bool) or isinstance(said, bool):
        # YAML 1.1 has yes and no; in words they are a choice of their own, and 0 and 1 say them too.
        if isinstance(said, bool) and isinstance(wanted, int | float):
            return wanted == said
        words = ("true", "false", "yes", "no", "on", "off")
        return wanted is said or (isinstance(wanted, str) and wanted.lower() in words)
    if wanted is None or said is None:
        return wanted is said
    if isinstance(said, list):
        parts = [part.strip() for part in wanted.split(",")] if isinstance(wanted, str) else [wanted]
        return len(parts) == len(said) and all(map(_means, parts, said))
    try:
        return wanted == said or str(wanted) == str(said) or float(wanted) == float(said)
    except (TypeError, ValueError, OverflowError):
        return False
