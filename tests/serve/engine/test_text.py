"""Text from tokens as they come: the same as of all at once, no character split, stop texts wherever they fall."""

import random

import pytest

from freemoe.serve.engine.text import BROKEN, IncrementalDetokeniser, StopTexts
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def bytes_of(text):
    """One token per byte."""
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def pieces(ids):
    text = IncrementalDetokeniser(TOKENIZER)
    found = [text.add_token(token) for token in ids]
    return [*found, text.flush_text()]


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 and 🙂🙃 mixed", "e\u0301 combining", ""])
def test_no_character_is_split(text):
    found = pieces(bytes_of(text))
    assert "".join(found) == text
    assert not any(BROKEN in piece for piece in found)
    assert found[-1] == ""


def test_any_bytes_are_what_the_tokenizer_makes_of_all_of_them():
    for seed in range(60):
        rng = random.Random(seed)
        # Mostly bytes that are no characters, also long runs of them, and special tokens, which are left out.
        ids = [rng.choice([rng.randrange(259), rng.randrange(130, 259)]) for _ in range(rng.choice([3, 20, 120]))]
        assert "".join(pieces(ids)) == TOKENIZER.decode(ids, skip_special_tokens=True), seed


def test_a_long_run_of_broken_bytes_is_told_before_its_end():
    # The byte 0x80 continues a character that never began.
    [odd] = {t for t in range(259) if TOKENIZER.convert_ids_to_tokens(t) == "Ģ"}
    found = pieces([odd] * 200)
    assert "".join(found) == BROKEN * 200
    assert any(found[:100])


def told(stops, parts):
    held, out = StopTexts(stops), []
    for part in parts:
        text, stopped = held.add_text(part)
        out.append(text)
        if stopped:
            return out, True
    return [*out, held.flush_text()], False


@pytest.mark.parametrize(
    ("stops", "parts", "expected", "stopped"),
    [
        ([], ["a", "b"], ["a", "b", ""], False),
        (["END"], ["xE", "N", "Dy"], ["x", "", ""], True),
        (["END"], ["xE", "N", "y"], ["x", "", "ENy", ""], False),
        (["END"], ["xEN"], ["x", "EN"], False),
        (["ab", "b"], ["xab"], ["x"], True),
        (["aab"], ["aaa", "b"], ["a", ""], True),
        (["\n\n"], ["one\n", "two\n\nthree"], ["one", "\ntwo"], True),
    ],
)
def test_stop_texts(stops, parts, expected, stopped):
    assert told(stops, parts) == (expected, stopped)


def test_stop_texts_do_not_depend_on_where_the_text_is_cut():
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choice("ab\n") for _ in range(rng.randrange(30)))
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        first = min((at for s in stops if (at := text.find(s)) >= 0), default=None)
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(5))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found, stopped = told(stops, parts)
        # Which of two stop texts that overlap is whole first may depend on the cut; what was told never goes beyond the first.
        assert stopped == (first is not None)
        if first is None:
            assert "".join(found) == text
        else:
            assert text.startswith("".join(found))
            assert len("".join(found)) <= first + 3
