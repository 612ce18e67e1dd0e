"""Files of others: whatever stands in them, they are read whole and within bounds, or refused in words, and soon."""

import json
import os
import time
from pathlib import Path

import pytest
import yaml

from freemoe.core import untrusted
from freemoe.core.errors import ArtifactError, DataError, RecipeError
from freemoe.core.untrusted import DEPTH, parse_json, parse_yaml, read_json, read_text, read_yaml

JSON_REFUSED = {
    "cut short": ('{"a": [1, 2', "not JSON"),
    "nothing": ("", "not JSON"),
    "deep lists": ("[" * (DEPTH + 1) + "]" * (DEPTH + 1), "deep"),
    "deep mappings": ('{"a":' * 200 + "1" + "}" * 200, "deep"),
    "deeper than Python's stack": ("[" * 10**6 + "]" * 10**6, "deep"),
    "never closed": ("[" * 10**6, "deep"),
    "a key twice": ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is given twice"),
    "NaN": ('{"a": NaN}', "NaN stands where a number is needed"),
    "infinity": ("[-Infinity]", "-Infinity stands where"),
    "a number beyond floats": ("[1e999]", "too large for a number"),
    "a number of many digits": ("[" + "9" * 10**6 + "]", "digits"),
    "half a pair": ('["\\ud800"]', "surrogate"),
    "half a pair in a key": ('{"\\uDFFF": 1}', "surrogate"),
    "a NUL": ('{"a": "b\\u0000c"}', "NUL"),
}


def test_json_that_is_well_is_what_python_reads():
    held = {"a": [1, -2.5, 1e300, True, None, "\x7f é 漢 😀"], "b": {"c": [[[]]]}, "": 0}
    for text in (json.dumps(held), json.dumps(held, ensure_ascii=False, indent=1)):
        assert parse_json(text, "x") == json.loads(text) == held
    deep = []
    for _ in range(DEPTH - 1):
        deep = [deep]
    assert parse_json(json.dumps(deep), "x") == deep


def test_results_may_hold_what_is_no_number():
    assert parse_json("[Infinity, 1e999]", "x", finite=False) == [float("inf")] * 2
    with pytest.raises(DataError, match="twice"):
        parse_json('{"a": NaN, "a": 1}', "x", finite=False)


def test_the_kind_of_the_error_is_the_callers(tmp_path):
    file = tmp_path / "m.json"
    file.write_text("{")
    with pytest.raises(ArtifactError, match=r"m\.json: not JSON"):
        read_json(file, ArtifactError)
    with pytest.raises(RecipeError, match="No file at"):
        read_yaml(tmp_path / "no.yaml", RecipeError)


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)

YAML_REFUSED = {
    "a billion laughs": (LAUGHS, "line 1: anchors and aliases"),
    "an alias to nothing": ("a: *b", "anchors and aliases"),
    "deep": ("[" * 2000 + "]" * 2000, "deep|not valid YAML"),
    "deep in blocks": ("".join(" " * i + "- \n" for i in range(100)) + " " * 100 + "- 1", "deep"),
    "a key twice": ("seed: 1\nseed: 2\n", "'seed' is given twice"),
    "a key twice inside": ("a: {b: 1, b: 1}", "'b' is given twice"),
    "a tag": ("a: !!python/object/apply:os.system [ls]", "the tag"),
    "a tag of YAML's own": ("a: !!set {b}", "the tag"),
    "a control character": ("a: \x1b[31m", "not valid YAML"),
    "half a pair": ('a: "\\ud800"', "surrogate|not valid YAML"),
    "a NUL": ('a: "b\\0c"', "NUL"),
    "too long": ("a: " + "x" * untrusted.MOST_YAML, "characters of YAML; at most"),
    "digits": ("a: " + "9" * 10**5, "digits"),
    "a day that is none": ("a: 2024-02-31", "day"),
    "two documents": ("a: 1\n---\na: 2", "not valid YAML"),
    "a list as a key": ("? [a]\n: b", "not valid YAML"),
}


@pytest.mark.parametrize(
    ("parse", "text", "reason"),
    [(parse_json, *case) for case in JSON_REFUSED.values()] + [(parse_yaml, *case) for case in YAML_REFUSED.values()],
    ids=[*JSON_REFUSED, *YAML_REFUSED],
)
def test_what_cannot_be_read_is_refused_in_words_and_soon(parse, text, reason):
    began = time.monotonic()
    with pytest.raises(RecipeError, match=reason) as caught:
        parse(text, "rows:7", RecipeError)
    assert str(caught.value).startswith("rows:7")
    assert len(str(caught.value)) < 400
    assert time.monotonic() - began < 5


def test_yaml_that_is_well_is_what_the_library_reads():
    text = "# about\na: [1, 2.5, yes, null, 'x: y']\nb:\n  c: {d: e}\n  é: |\n    two\n    lines\n"
    assert parse_yaml(text, "x") == yaml.safe_load(text)


FILES = {
    "absent": (lambda path: None, "No file at"),
    "a folder": (lambda path: path.mkdir(), "is a folder"),
    "a pipe": (lambda path: os.mkfifo(path), "a pipe or a device"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "a pipe or a device"),
    "a link to itself": (lambda path: path.symlink_to(path), "cannot be read"),
    "UTF-16": (lambda path: path.write_text("text", encoding="utf-16-le"), "byte 1 is NUL"),
    "Latin": (lambda path: path.write_bytes(b"caf\xe9"), "byte 3 is 0xe9"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_cannot_be_read(case, tmp_path):
    make, reason = FILES[case]
    make(tmp_path / "f")
    with pytest.raises(DataError, match=reason):
        read_text(tmp_path / "f")


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b"])
def test_names_that_cannot_be(name):
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_text(Path(name))
    assert len(str(caught.value)) < 400
    assert "\0" not in str(caught.value)


def test_a_large_file_is_refused_before_it_is_read(tmp_path, monkeypatch):
    file = tmp_path / "large.json"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)  # of holes
    with pytest.raises(DataError, match=r"1,024\.0 GiB, and at most"):
        read_json(file)
    small = tmp_path / "small.json"
    small.write_text("[1, 2, 3]")
    monkeypatch.setattr(untrusted, "available_memory_bytes", lambda: 16)
    with pytest.raises(DataError, match=r"9 bytes, and at most 4 bytes.*a quarter of the free memory"):
        read_json(small)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "f").write_bytes(b"\xef\xbb\xbfa\r\n")
    assert read_text(tmp_path / "f") == "a\r\n"
