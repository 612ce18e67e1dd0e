"""What others wrote is shown as what it is: no terminal, Markdown or HTML reads more into it."""

import html
import xml.etree.ElementTree as ElementTree

import pytest

from freemoe.core import neutral

UNSAFE = [
    *(chr(n) for n in range(32) if chr(n) not in "\t\n"),
    *map(chr, range(0x7F, 0xA0)),
    *"\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff\U000e0041\ud800\udfff",
]
HOSTILE = r"""<script>alert(1)</script> <img src=x onerror=alert(1)>
a | b
[x](https://example.org) ![x](y) [x][y]
**bold** _soft_ ~~gone~~ `code` $x$
&lt;b&gt;
# title
- item
3. item
> quote
https://example.org www.example.org
\<b>"""


@pytest.mark.parametrize("character", UNSAFE, ids=lambda c: f"U+{ord(c):04X}")
def test_unsafe_characters_become_their_escapes(character):
    shown = neutral.escape_terminal(f"a{character}b")
    assert character not in shown
    assert shown.isprintable()
    # Nothing is lost: the escape is Python's own.
    assert shown.encode().decode("unicode_escape") == f"a{character}b"
    for made in (neutral.escape_html, neutral.escape_markdown, neutral.code_span, neutral.one_line):
        # White space at the most stays of it: a line separator, where one line is asked for.
        assert character not in made(f"a{character}b")


@pytest.mark.parametrize(
    "text", ["wörter_1-x", "محمد", "שלום", "日本語", "😀 👩‍👩‍👧", "a\tb\nc", "50 % [8.7, 9.7] (x)", "math/0+code/1"]
)
def test_ordinary_text_stays_as_it_is(text):
    assert neutral.escape_terminal(text) == text
    assert neutral.escape_html(text) == text
    if "\n" not in text:
        assert neutral.escape_markdown(text) == text
        assert neutral.one_line(text) == text


@pytest.mark.parametrize("text", [*HOSTILE.split("\n"), "one\n\n# two"])
def test_markdown_is_text_again_when_it_is_rendered(text):
    markdown = pytest.importorskip("markdown")
    made = neutral.escape_markdown(text)
    assert "\n" not in made
    rendered = markdown.markdown(made, extensions=["tables"])
    inside = rendered.removeprefix("<p>").removesuffix("</p>")
    assert "<" not in inside, rendered
    # What Python's own renderer leaves escaped are characters that it does not know and the hub's does.
    said = html.unescape(inside).replace("\\", "")
    assert said == " ".join(text.split()).replace("\\", "")


@pytest.mark.parametrize("text", ["a`b", "``", "`", "a``b`c", "plain"])
def test_a_span_of_code_holds_what_it_was_given(text):
    markdown = pytest.importorskip("markdown")
    assert (
        markdown.markdown(f"x {neutral.code_span(text)} y")
        == f"<p>x <code>{html.escape(text, quote=False)}</code> y</p>"
    )


def test_html_and_svg_stay_well_formed():
    hostile = "\x00\x1b]0;x\x07<b a='\"'>&\u202e"
    made = f'<t a="{neutral.escape_html(hostile)}">{neutral.escape_html(hostile)}</t>'
    read = ElementTree.fromstring(made)
    assert read.text == read.get("a") == neutral.escape_terminal(hostile)


def test_one_line_is_short_where_it_must_be():
    assert neutral.one_line("a\n\n b\t c") == "a b c"
    cut = neutral.one_line("x" * 1000, 40)
    assert len(cut) == 40
    assert "…" in cut
