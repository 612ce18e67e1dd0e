"""Task files: JSONL, JSON, CSV, TSV and text.

Accepted is a file whose every document is what a plain reader finds in its row: the question, the choices, and the right one;
and no question stands on both sides of the split, whatever key its rows have.
"""

import csv
import io
import json
import unicodedata

from hypothesis import strategies as st

from freemoe.core.errors import FreeMoEError
from freemoe.evals.tasks.domains import load_domain
from freemoe.evals.tasks.user_tasks import read_task_file
from tests.hardening.fuzz.case import require
from tests.hardening.fuzz.drawing import TEXTS, near, rarely, spliced

ROWS = (
    {"question": "Who rules?", "choices": ["the judge", "the king", "nobody"], "answer": 1},
    {"question": "What is 2+2?", "choices": ["3", "4"], "answer": "B", "id": "sum", "field": "maths"},
    {"question": "Which one?", "A": "this", "B": "that", "answer": "A"},
    {"prompt": "12+7=", "target": "19", "key": "sums"},
    {"instruction": "Say hello.", "input": "", "output": "Hello."},
    {"prompt": "Once", "completion": " upon a time"},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    {"text": "A passage that is long enough to be one."},
)
SUFFIXES = (".jsonl", ".jsonl", ".jsonl", ".json", ".csv", ".tsv", ".txt")


def strategy(material):
    """The end of a file's name, and its bytes as Latin-1."""

    @st.composite
    def files(draw):
        suffix = draw(st.sampled_from(SUFFIXES))
        start = json.loads(json.dumps(draw(st.sampled_from(ROWS))))
        rows = []
        # Enough to be carved in two, some of the time, and then with each question more than once.
        times = draw(st.sampled_from([1, 1, 1, 2, 3]))
        for number in range(draw(st.integers(1, 6)) if times == 1 else draw(st.integers(4, 20))):
            texts = {k for k, v in start.items() if isinstance(v, str)} - _FIXED
            row = {k: f"{v} {number // times}" if k in texts else v for k, v in start.items()}
            for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 2]))):
                key = draw(st.sampled_from([*row, "id", "key", "field", "answer"]))
                if not draw(rarely(6)):
                    row[key] = draw(st.one_of(st.sampled_from(_SOUND.get(key, ("x",))), near(row.get(key, 0))))
                else:
                    row.pop(key, None)
            if times > 1:
                row["key"] = str(number)
            rows.append(draw(near(rows)) if draw(rarely(60)) else row)
        raw = _written(rows, suffix, not draw(rarely(15)), draw(st.booleans()))
        pieces = st.one_of(st.sampled_from(_PIECES), st.sampled_from(TEXTS).map(_bytes), st.binary(max_size=4))
        raw = spliced(draw, raw, pieces, 6, 3)
        return {"suffix": suffix, "bytes": raw.decode("latin-1")}

    return files()


_SOUND = {
    "answer": (0, 1, "A", "B", "b", "1", "0", 1.0, True, "C", 2),
    "choices": (["yes", "no"], ["1", "2"], ["A", "B"], ["B", "A"], [" a", "a"]),
    "id": ("a", 1, "1"),
    "field": ("law", 7),
}
_FIXED = {"answer", "A", "B", "key"}
_PIECES = (
    *(b"\n", b"\r\n", b"\r", b"\xef\xbb\xbf", b"\xff\xfe", b"\xc3\x28", b"\x00", b"\x1a", b'"', b",", b"\t"),
    *(b";", b"{", b"]", b"NaN", b"1e999", b"-0", b"true", b'"answer": 0, ', b"\\ud800", b"\\u0000", b"[" * 3000),
    *(b"9" * 5000, b"//", b"'"),
)


def _bytes(text):
    return text.encode("utf-8", "surrogatepass")


def _written(rows, suffix, ascii_only, wrapped):
    if suffix == ".jsonl":
        return _bytes("".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows))
    if suffix == ".json":
        return _bytes(json.dumps({"data": rows} if wrapped else rows, ensure_ascii=ascii_only))
    if suffix == ".txt":
        return _bytes("\n\n".join(str(row) for row in rows))
    out = io.StringIO()
    names = list(dict.fromkeys(k for row in rows if isinstance(row, dict) for k in row))
    writer = csv.writer(out, delimiter="\t" if suffix == ".tsv" else ",")
    writer.writerow(names)
    for row in rows:
        held = [row.get(name, "") if isinstance(row, dict) else row for name in names]
        writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in held])
    return _bytes(out.getvalue())


def warm(material):
    assert material.tokenizer is not None


def attempt(what, material, folder):
    """Read a task file as a command does, and hold its documents against its rows."""
    path = folder / f"rows{what['suffix']}"
    path.write_bytes(what["bytes"].encode("latin-1"))
    data = None
    try:
        _require_apart(load_domain("d", [str(path)], tokenizer=material.tokenizer))
    except FreeMoEError as error:  # often too few to be carved in two: what they are is looked at all the same
        data = error
    if what["suffix"] == ".txt":
        if data:
            raise data
        return
    shape, documents = read_task_file(path, "t", tokenizer=material.tokenizer)
    rows = _plain_rows(path)
    require(len({d.id for d in documents}) == len(documents), "two documents have one id")
    if shape.name in ("choice", "lettered"):
        require(len(rows) == len(documents), f"{len(rows)} rows became {len(documents)} documents")
        for row, document in zip(rows, documents, strict=True):
            _require_choice(row, document)
    if shape.name == "target":
        require([r["target"] for r in rows] == [d.reference for d in documents], "another target")
    for document in documents:
        for text in (document.prompt, *document.answers):
            bad = "\0" in text or any("\ud800" <= c <= "\udfff" for c in text)
            require(not bad, f"a document holds NUL or half a character: {text!r:.80}")


def _require_apart(domain):
    """What is searched and what is reported share no question; of texts, blocks that are the same by chance may be on both."""
    searched, reported = (
        {(_letters(d.prompt), _letters(d.reference)) for d in documents if d.kind != "text"}
        for documents in (domain.reference.documents, domain.reported._documents)
    )
    require(not searched & reported, f"searched and reported: {sorted(searched & reported)[:3]}")


def _letters(text):
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


def _once(pairs):
    keys = [key for key, _ in pairs]
    require(len(set(keys)) == len(keys), f"a row names a key twice: {keys}")
    return dict(pairs)


def _plain_rows(path):
    """The rows by the plainest reader there is."""
    text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    if path.suffix == ".jsonl":
        return [json.loads(line, object_pairs_hook=_once) for line in text.split("\n") if line.strip()]
    if path.suffix == ".json":
        value = json.loads(text, object_pairs_hook=_once)
        lists = [v for v in value.values() if isinstance(v, list) and v] if isinstance(value, dict) else [value]
        return next(v for v in lists if v and isinstance(v[0], dict))
    # A table begins with its first line that is not empty.
    text = text.lstrip("\n")
    first = text.split("\n", 1)[0]
    comma = ";" if first.count(";") > first.count(",") else ","
    rows = csv.DictReader(io.StringIO(text), delimiter="\t" if path.suffix == ".tsv" else comma)
    return [row for row in rows if any(row.values())]


def _require_choice(row, document):
    """The right choice is the one that the row names, by number, letter or text."""
    row = {k.strip(): v for k, v in row.items() if isinstance(k, str)}
    wanted = next(row[name] for name in ("answer", "answerKey", "label", "gold") if name in row)
    require(not isinstance(wanted, bool | float), f"the answer {wanted!r} was taken for a number")
    choices = [answer.removeprefix(" ") for answer in document.answers]
    told = str(wanted).strip()
    letter = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[document.gold]
    right = choices[document.gold].strip()
    require(document.prompt == row.get("question", row.get("prompt")), f"another question: {document.prompt!r}")
    require(
        told == right or told.upper() == letter or (told.lstrip("+").isdecimal() and int(told) == document.gold),
        f"the answer {wanted!r} became {document.gold} of {choices}",
    )
