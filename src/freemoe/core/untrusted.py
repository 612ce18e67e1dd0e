"""Files that others wrote, read within bounds: size, depth, and nothing that means two things.

Every recipe, task file, manifest, result and config is read here. A file is refused that is too large, nested too deep, names
a key twice, has YAML's anchors (a few lines of which can mean gigabytes), NaN or infinity for a number, half of a
surrogate pair, or the character NUL, which stands in no text and is what files of another coding are full of.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import stat
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from freemoe.core.errors import DataError, FreeMoEError
from freemoe.core.memory import available_memory_bytes
from freemoe.core.numbers import format_bytes

T = TypeVar("T")

DEPTH = 64
"""Lists and mappings in one another at most."""

MOST_YAML = 1 << 18
"""Bytes of a YAML document at most; a recipe has a few thousand."""

MOST_JSON = 1 << 28
"""Bytes of a JSON document at most; of JSON lines that of a line."""

MOST_TEXT = 1 << 33
"""Bytes of a text file at most, where a quarter of the free memory is not less."""

_UNSURE = re.compile(r"\\u(?:d[89a-f]|0000)", re.IGNORECASE)


def require_file(path: Path, error: type[FreeMoEError] = DataError) -> int:
    """Bytes of a file that can be read.

    Raises:
        FreeMoEError: Of the kind that was asked for, when it is absent, a folder, no regular file, or its name is impossible.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        raise error(f"No file at {path.absolute()}. Check the path; it is read from the current folder.") from None
    except (OSError, ValueError) as trouble:
        raise _unreadable_error(path, trouble, error) from None
    if stat.S_ISDIR(found.st_mode):
        raise error(f"{path.absolute()} is a folder, and a file is needed here.")
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{path.absolute()} is a pipe or a device, and a file is needed here. Write its content to one.")
    return found.st_size


def read_bytes(path: Path, most: int, error: type[FreeMoEError] = DataError) -> bytes:
    """A file's bytes.

    So many at most, and no more than a quarter of the free memory.
    """
    size = require_file(path, error)
    room = min(most, available_memory_bytes() // 4)
    if size > room:
        raise error(
            f"{path} has {format_bytes(size)}, and at most {format_bytes(room)} are read here"
            f"{'' if room == most else ' (a quarter of the free memory)'}. Check that it is the right file, or divide it."
        )
    try:
        return path.read_bytes()
    except OSError as trouble:
        raise _unreadable_error(path, trouble, error) from None


def read_text(path: Path, most: int = MOST_TEXT, error: type[FreeMoEError] = DataError) -> str:
    """A file's UTF-8 text, a byte-order mark left out; errors as of `read_bytes`, and for bytes that are no text."""
    raw = read_bytes(path, most, error)
    if (at := raw.find(b"\0")) >= 0:
        raise error(f"{path}: byte {at} is NUL, which no text holds. Is it UTF-16, or no text? Save it as UTF-8.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as trouble:
        raise error(
            f"{path}: byte {trouble.start} is {hex(raw[trouble.start])}, which is not UTF-8. Save it as UTF-8."
        ) from None


def read_json(path: Path, error: type[FreeMoEError] = DataError, finite: bool = True) -> Any:
    """A JSON document; errors as of `read_text` and `parse_json`."""
    return parse_json(read_text(path, MOST_JSON, error), str(path), error, finite)


def parse_json(text: str, where: str, error: type[FreeMoEError] = DataError, finite: bool = True) -> Any:
    """What a JSON document says.

    ``where`` is what messages call it; ``finite`` refuses NaN and infinity, which JSON does not have and Python writes all
    the same.

    Raises:
        FreeMoEError: When it is no JSON, too long, too deep, names a key twice, or holds what no text and no number is.
    """
    if len(text) > MOST_JSON:
        raise error(f"{where}: {len(text):,} characters of JSON; at most {MOST_JSON:,} are read.")
    try:
        value = (_STRICT if finite else _LOOSE).decode(text)
    except json.JSONDecodeError as trouble:
        place = f"{where}:{trouble.lineno}" if "\n" in text.strip() else where
        around = text[max(0, trouble.pos - 40) : trouble.pos + 40].strip()
        raise error(f"{place}: not JSON ({trouble.msg} at column {trouble.colno}): {around!r}.") from None
    except RecursionError:
        raise _depth_error(where, error) from None
    except ValueError as trouble:  # of the hooks below, and of numbers of thousands of digits
        raise error(f"{where}: {trouble}.") from None
    if text.count("[") + text.count("{") > DEPTH:
        for depth, held in walk_values(value):
            if depth > DEPTH and isinstance(held, dict | list):
                raise _depth_error(where, error)
    if _UNSURE.search(text):
        _require_texts(value, where, error)
    return value


def validate_strict(
    schema: type[T], value: Any, where: str, error: type[FreeMoEError] = DataError, advice: str = ""
) -> T:
    """Plain data as a pydantic type says it is: a number is no text, and a text no number.

    Raises:
        FreeMoEError: It is not; with the places, what is allowed there, and what was seen.
    """
    try:
        # From JSON, where a list may be a tuple.
        return TypeAdapter(schema).validate_json(json.dumps(value), strict=True)
    except ValidationError as trouble:
        raise error(f"{where} is not whole: {faults_text(trouble.errors())} {advice}".rstrip()) from None


def faults_text(faults: Sequence[Any]) -> str:
    """What pydantic found, in a sentence: the first places with what is allowed there and what was seen."""
    said = [
        f"{'.'.join(map(str, f['loc']))}: {f['msg']} (seen: {f['input']!r:.80})".removeprefix(": ") for f in faults[:3]
    ]
    return "; ".join(said) + (f"; and {len(faults) - 3:,} more" if len(faults) > 3 else "") + "."


def text_fault(text: str) -> str:
    """Why a string is no text that a tokenizer, a file name or UTF-8 can hold; empty where it is."""
    if "\0" in text:
        return "the character NUL, which no text holds"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is no character"
    return ""


def _require_texts(value: Any, where: str, error: type[FreeMoEError]) -> None:
    for _, held in walk_values(value):
        if isinstance(held, str) and (fault := text_fault(held)):
            raise error(f"{where}: {held!r:.60} holds {fault}.")


def walk_values(value: Any) -> Iterator[tuple[int, Any]]:
    """Every value in plain data with its depth, keys too, without recursion."""
    left = [(1, value)]
    while left:
        depth, held = left.pop()
        yield depth, held
        if isinstance(held, dict):
            left += [(depth + 1, part) for pair in held.items() for part in pair]
        elif isinstance(held, list | tuple):
            left += [(depth + 1, part) for part in held]


def read_yaml(path: Path, error: type[FreeMoEError] = DataError) -> Any:
    """A YAML document; errors as of `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path, MOST_YAML, error), str(path), error)


def dump_yaml(value: Any) -> str:
    """Plain data as YAML, in its own order, that `parse_yaml` reads back."""
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)


def parse_yaml(text: str, where: str, error: type[FreeMoEError] = DataError) -> Any:
    """What a YAML document says.

    Raises:
        FreeMoEError: When it is no YAML, too long, too deep, names a key twice, has anchors, aliases or tags, or holds what no
            text is.
    """
    import yaml

    if len(text) > MOST_YAML:
        raise error(f"{where}: {len(text):,} characters of YAML; at most {MOST_YAML:,} are read.")
    try:
        _check_events(yaml, text, where, error)
        value = yaml.load(text, Loader=_unique_key_loader())
    except (yaml.YAMLError, RecursionError) as trouble:
        raise error(f"{where} is not valid YAML: {trouble}") from None
    except ValueError as trouble:  # numbers and dates that look like some and are none
        raise error(f"{where}: {trouble}.") from None
    _require_texts(value, where, error)
    return value


def require_safe_yaml(path: Path) -> None:
    """Refuse a YAML file that another library shall read: as `parse_yaml`, but tags, and whether it is YAML, are that library's."""
    import yaml

    text = read_text(path, MOST_YAML)
    with contextlib.suppress(yaml.YAMLError):
        _check_events(yaml, text, str(path), DataError, tags=True)


def _check_events(yaml: Any, text: str, where: str, error: type[FreeMoEError], tags: bool = False) -> None:
    """Raise for what is not allowed, before anything is made of the document."""
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise error(
                f"{where}, line {line}: anchors and aliases (&{event.anchor}, *{event.anchor}) are not read here. Write the value "
                "out."
            )
        if not tags and isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None):
            raise error(
                f"{where}, line {line}: the tag {event.tag!r:.60} is not read here. Write the value without it."
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEPTH:
                raise _depth_error(f"{where}, line {line}", error)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _unique_key_loader() -> Any:
    """PyYAML's safe loader that takes a key once only."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class UniqueKeyLoader(base):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen: set[tuple[str, str]] = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if (key.tag, key.value) in seen:
                    said = f"the key {key.value!r:.60} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, said, key.start_mark)
                seen.add((key.tag, key.value))
            return super().construct_mapping(node, deep)

    return UniqueKeyLoader


def _require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r:.60} is given twice")
    return found


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} stands where a number is needed")


_STRICT = json.JSONDecoder(
    object_pairs_hook=_require_unique_keys, parse_float=_parse_finite, parse_constant=_no_constant
)
_LOOSE = json.JSONDecoder(object_pairs_hook=_require_unique_keys)


def _depth_error(where: str, error: type[FreeMoEError]) -> FreeMoEError:
    return error(f"{where}: lists and mappings stand more than {DEPTH} deep in one another.")


def _unreadable_error(path: Path, trouble: Exception, error: type[FreeMoEError]) -> FreeMoEError:
    why = trouble.strerror if isinstance(trouble, OSError) and trouble.strerror else str(trouble)
    name = str(path)
    shown = name if len(name) <= 200 else f"{name[:100]}...{name[-60:]} ({len(name):,} characters)"
    return error(f"{shown!r} cannot be read: {why}. Check its name and who may read it.")
