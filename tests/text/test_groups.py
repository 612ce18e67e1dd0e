"""What comes from one source: by headings, by what stands between articles, by rows, else by stretches."""

import random

import pytest

from freemoe.text.blocks import cut_passages, split_passages
from freemoe.text.groups import LOOSE, STRETCHES, TextPassage, divide_by_source

WORDS = ("otter", "falcon", "lynx", "heron", "viper", "bison")
FILL = ["the", "of", "and", "to", "in", "was", "for", "on", "with", "that", "by", "from"]


def article(word, heading="", paragraphs=12):
    """An article whose every paragraph, and nothing else, has its word."""
    draw = random.Random(word)
    return heading + "".join(" ".join([word, *draw.choices(FILL, k=40), word]) + ".\n\n" for _ in range(paragraphs))


FORMS = {
    "wikitext": lambda w: article(w, f" = {w} = \n \n ") + f" = = Life of {w} = = \n \n {article(w, paragraphs=4)} ",
    "mediawiki": lambda w: article(w, f"= {w} =\n\n"),
    "markdown": lambda w: article(w, f"# {w}\n\n```\n\n# {w} in code\n\n```\n\n"),
    "markdown, no blank line": lambda w: article(w, f"# {w}\n"),
    "markdown, second level": lambda w: article(w, f"## {w}\n\n### More\n\n"),
    "end of text": lambda w: article(w) + "<|endoftext|>\n",
    "rules": lambda w: article(w) + "* * *\n\n",
    "blank lines": lambda w: article(w) + "\n\n",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [False, True])
def test_every_article_is_a_group(form, rows):
    texts = [FORMS[form](word) for word in WORDS]
    articles, unit = divide_by_source(texts if rows else ["".join(texts)])
    assert LOOSE not in unit
    assert len({a.group for a in articles}) == len(articles) == 6
    assert "".join(articles) == "".join(texts)
    for word in WORDS:
        assert sum(word in a for a in articles) == 1
    # And no part of a conversion or a trim shares a word with another.
    parts = split_passages(cut_passages(texts if rows else ["".join(texts)], characters=500), seed=1)
    sides = [{w for w in WORDS if any(w in t for t in side)} for side in (parts.train, parts.held_out, parts.test)]
    assert all(sides)
    assert sum(map(len, sides)) == 6


def test_a_data_set_with_a_row_for_each_line_has_the_articles_of_its_headings():
    lines = "".join(FORMS["wikitext"](word) for word in WORDS).split("\n")
    articles, unit = divide_by_source(lines)
    assert unit == "articles by heading"
    assert len(articles) == 6


CODE = "".join(f"# Step {i}\nx{i} = {i}\n\n" for i in range(100))


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        (article("one", "# One\n\n", 200), STRETCHES),
        ("".join(article(w, f"# {w}\n\n") for w in WORDS[:3]), STRETCHES),
        ("# One\n\n" + "".join(article("one", f"## Part {n}\n\n") for n in range(8)), "sections by heading"),
        ("# One\n\n" + "".join(article("one", f"## Part {n}\n\n", 300) for n in range(8)), STRETCHES),
        (CODE * 3, STRETCHES),
        ("word " * 5000, STRETCHES),
        ("one line\n" * 3000, STRETCHES),
        ("short", STRETCHES),
        ("\n\n\n", STRETCHES),
    ],
)
def test_where_articles_are_too_few_it_says_so(text, unit):
    articles, said = divide_by_source([text])
    assert said.startswith(LOOSE)
    assert unit in said
    assert "".join(articles) == text
    if len(text) > 20000 and "\n" in text:
        assert len(articles) > 8


def test_rows_are_groups_and_a_column_joins_them():
    rows = [TextPassage(f"Row number {n} of all.", group="AB"[n % 2]) for n in range(10)]
    articles, unit = divide_by_source(rows)
    assert unit == "groups of rows"
    assert len({a.group for a in articles}) == 2
    assert list(articles) == list(rows)
    assert len({a.group for a in divide_by_source([str(r) for r in rows])[0]}) == 10
    # Two of the same are one.
    assert len({a.group for a in divide_by_source([*map(str, rows), "ROW number 3 of all!"])[0]}) == 10


def test_few_groups_leave_no_part_empty():
    for seed in range(20):
        parts = split_passages([TextPassage(f"text {n}", group=str(n % 3)) for n in range(30)], seed=seed)
        assert {len(parts.train), len(parts.held_out), len(parts.test)} == {10}
