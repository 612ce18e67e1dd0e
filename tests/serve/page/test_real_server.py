"""The page in a browser, on the server itself with a tiny base, random experts and a router."""

import pytest

from freemoe.core import neutral
from freemoe.serve.page import load_page
from tests.serve.page.using import IDLE, ask, choose, fill, press, read, send, texts

pytestmark = pytest.mark.browser

PROMPT = "The court?"


def said(there, model):
    """What the server answers when nobody looks."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": 0}
    answer = there.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return neutral.escape_terminal(answer.json()["choices"][0]["message"]["content"])


def test_the_page_talks_to_the_server(tab, there):
    home = there.client.get("/")
    assert (home.content, {name: home.headers[name] for name in load_page()[1]}) == load_page()
    tab.open(f"{there.url}/", 1280)
    tab.until("document.getElementById('expert').options.length")
    assert read(tab, "#expert option") == ["auto", "base", *"abcd"]
    press(tab, "Settings")
    fill(tab, "max-tokens", 12)
    press(tab, "Save")
    assert ask(tab, PROMPT) == said(there, "auto")
    assert "chosen by the router, " in read(tab, ".who")[0]
    tab.until("document.querySelector('.share')")
    tab.click("document.getElementById('beside')")
    choose(tab, "base:b")
    ask(tab, PROMPT)
    assert texts(tab)[1:] == [said(there, "base"), said(there, "base:b")]
    assert texts(tab)[1] != texts(tab)[2]
    assert read(tab, ".who")[1:] == ["base", "b"]
    assert tab.complaints() == []
    # An error in the server's own words.
    press(tab, "Settings")
    fill(tab, "max-tokens", 100_000)
    press(tab, "Save")
    tab.click("document.getElementById('beside')")
    send(tab, PROMPT)
    tab.until(f"document.querySelectorAll('.turn').length === 3 && {IDLE}")
    assert "maximum context length is 128 tokens" in read(tab, ".error p")[0]
