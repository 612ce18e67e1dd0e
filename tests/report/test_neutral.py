"""Names and texts of others stand in pages, pictures, cards and tables as text: none of them adds an element or an attribute."""

import io
import re
from html.parser import HTMLParser

import pytest

from freemoe.cli.common import make_console
from freemoe.core import neutral
from freemoe.domain_experts.prove import card as experts_card
from freemoe.domain_experts.report import subdomain_table, summary_table
from freemoe.hookmoe import card as trimmed_card
from freemoe.report.figures.drawing import ReportFigure
from freemoe.report.tables import evaluation_table
from freemoe.tomoe import card as converted_card
from tests.report.family import FAMILY
from tests.report.synthetic import typed

BENIGN = "xyz"
HOSTILE = {
    "HTML": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "attributes": "\" onload='alert(1)' x=\"",
    "entities": "&lt;b&gt;&#x202e;",
    "escapes": "\x1b[31m\x1b]8;;http://example.org\x07\x9b2J\r\x08",
    "bidirectional": "\u202e\u2066\u200f\u2028",
    "Markdown": "| a | b | **b** __c__ `d` [e](http://example.org) ![f](g) <http://h.example>",
    "lines": "\n\n# title\n\n- item\n\n---\n| a |\n|---|\n",
    "mathematics": "$x^{$ $$ \\frac",
    "markup of the terminal": "[red]x[/red] [/] [link=http://example.org]y[/link]",
    "templates": "{{ 7 * 7 }} {% raw %} ${x}",
}

NAMES = ("name", "notes", "metric", "prompts", "words", "origin", "artefact", "model", "revision", "cpu", "platform")
NAMES += ("verdict",)
"""Of entries of results that hold words of others."""


def said_with(value, more, key=""):
    """A result whose names end in something else."""
    if isinstance(value, dict):
        return {k: said_with(v, more, k) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [said_with(v, more, key) for v in value]
    return f"{value} {more}" if isinstance(value, str) and key in NAMES else value


class Skeleton(HTMLParser):
    """Elements and the names of their attributes, in order."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, *(name for name, _ in attrs)))

    def handle_endtag(self, tag):
        self.found.append("/" + tag)


def safe(text):
    return neutral.escape_terminal(text) == text


def elements(page):
    """Those of a page beside its pictures."""
    return Skeleton(re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)).found


@pytest.mark.parametrize("kind", FAMILY)
def test_pages(kind, monkeypatch):
    make, page = FAMILY[kind]
    monkeypatch.setattr(ReportFigure, "svgs", lambda *_: ("<svg></svg>", "<svg></svg>"))
    wanted = elements(page(said_with(make(), BENIGN)))
    for name, more in HOSTILE.items():
        shown = page(said_with(make(), more))
        assert safe(shown), name
        assert elements(shown) == wanted, name


@pytest.mark.parametrize("kind", FAMILY)
def test_pictures(kind):
    make, page = FAMILY[kind]
    shown = page(said_with(make(), HOSTILE["HTML"] + HOSTILE["escapes"]))
    assert safe(shown)
    for svg in re.findall(r"<svg.*?</svg>", shown, flags=re.DOTALL):
        tags = {entry[0] for entry in Skeleton(svg).found if isinstance(entry, tuple)}
        assert not tags & {"script", "img", "a", "foreignobject"}
        assert not {name for entry in Skeleton(svg).found for name in entry[1:] if name.startswith("on")}


CARDS = {"build": experts_card, "convert": converted_card, "trim": trimmed_card}


@pytest.mark.parametrize("command", CARDS)
def test_cards(command):
    markdown = pytest.importorskip("markdown")
    result, shown = FAMILY[command][0](), {}
    for name, more in {**HOSTILE, BENIGN: BENIGN}.items():
        card = CARDS[command].model_card(typed(said_with(result, more)))
        assert safe(card), name
        body = card.split("\n---\n", 1)[1]
        shown[name] = Skeleton(markdown.markdown(body, extensions=["tables", "fenced_code"])).found
    assert [name for name in HOSTILE if shown[name] != shown[BENIGN]] == []


@pytest.mark.parametrize("hostile", HOSTILE)
def test_tables_of_the_terminal(hostile):
    for kind, tables in (("build", (summary_table, subdomain_table)), ("eval", (evaluation_table,))):
        make, _ = FAMILY[kind]
        for table in tables:
            console = make_console(False, False, {"COLUMNS": "200"})
            console.file = io.StringIO()
            console.print(table(typed(said_with(make(), HOSTILE[hostile]))))
            assert safe(console.file.getvalue())
            if hostile == "markup of the terminal":
                assert "[red]" in console.file.getvalue().replace("\n", "")
