"""The page in a browser: what goes wrong is said in words, and one can go on."""

import re
import threading

import pytest

from freemoe.core import neutral
from tests.serve.page.stand_in import CUT, QUIET, StandIn, refusal, standing_in
from tests.serve.page.using import IDLE, ask, fill, opened, press, read, send, texts

pytestmark = pytest.mark.browser

TAG = "<img src=x onerror='window.caught = 1'>"
ESCAPES = "\x1b[31mred\x07 \u202egnp.exe\u200b"


def test_a_refusal_is_shown_as_the_server_words_it(page, server):
    server.refuses["auto"] = [refusal(400, "The prompt has 900 tokens, the context 512.")]
    ask(page, "long")
    assert read(page, ".error p") == ["The prompt has 900 tokens, the context 512."]
    assert page.run("document.querySelector('.error p').getAttribute('role')") == "alert"
    press(page, "Try again")
    page.until(f"{IDLE} && document.querySelector('.text').textContent")
    assert texts(page) == ["I am math."]
    assert read(page, ".error") == []
    # What failed is no part of the conversation.
    assert [len(body["messages"]) for body in server.bodies()] == [1, 1]


def test_a_refusal_that_is_no_json_is_told_by_its_status(page, server):
    server.refuses["auto"] = [refusal(502, None)]
    ask(page, "?")
    assert read(page, ".error p") == ["The server answered 502 Bad Gateway."]


def test_a_wait_is_counted_down(page, server):
    server.refuses["auto"] = [refusal(429, "32 requests wait already.", {"retry-after": "2"})]
    # All that the button ever says: a busy machine may skip one of them.
    page.run(
        "window.said = []; new MutationObserver(() => { const button = document.querySelector('.error button');"
        " if (button && said.at(-1) !== button.textContent) said.push(button.textContent); })"
        ".observe(document.body, {subtree: true, childList: true}); 0"
    )
    ask(page, "?")
    assert read(page, ".error p") == ["32 requests wait already."]
    page.until("!document.querySelector('.error button').disabled")
    said = page.run("said")
    assert said[-1] == "Try again"
    assert set(said[:-1]) <= {"Try again in 2 s", "Try again in 1 s"}
    assert said[:-1] == sorted(said[:-1], reverse=True) != []
    press(page, "Try again")
    page.until(f"{IDLE} && document.querySelector('.text').textContent")
    assert texts(page) == ["I am math."]


def test_a_key_is_asked_for_sent_and_kept_in_the_tab_only(tab, server):
    server.key = "s3cret"
    opened(tab, server)
    assert read(tab, "#notice .error p") == ["Wrong or missing API key."]
    press(tab, "Set the API key")
    assert tab.run("document.activeElement.id") == "key"
    fill(tab, "key", "no spaces")
    press(tab, "Save")
    assert tab.run("document.getElementById('dialog').open")
    fill(tab, "key", "s3cret")
    press(tab, "Save")
    tab.until("document.getElementById('expert').options.length")
    assert read(tab, ".error") == []
    assert ask(tab, "?") == "I am math."
    assert {asked.key for asked in server.asked} == {"Bearer s3cret"}
    assert "s3cret" in tab.run("JSON.stringify({...sessionStorage})")
    elsewhere = "JSON.stringify({...localStorage}) + document.cookie + document.documentElement.outerHTML"
    assert "s3cret" not in tab.run(elsewhere)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([{"error": {"message": "The logits were NaN.", "code": "nan"}}, " never"], "The logits were NaN."),
        ([b"data: no JSON\n\n"], "The server sent something that cannot be read."),
        ([b"data: null\n\n"], "The server sent something that cannot be read."),
        ([b"data: 7\n\n"], "The server sent something that cannot be read."),
        ([CUT], "The connection broke before the answer was complete."),
        ([QUIET], "The connection broke before the answer was complete."),
    ],
    ids=["error", "no JSON", "null", "7", "cut", "quiet"],
)
def test_an_answer_that_breaks_off_keeps_what_came(page, server, steps, words):
    more = threading.Event()
    server.says["auto"] = ["So far", more, *steps]
    send(page, "?")
    page.until("document.querySelector('.text')?.textContent")
    more.set()
    page.until(IDLE)
    assert texts(page) == ["So far"]
    assert read(page, ".error p") == [words]


def test_a_server_that_has_gone_and_comes_back(tab):
    with standing_in(StandIn()) as server:
        opened(tab, server)
        port = int(server.address.rstrip("/").rsplit(":", 1)[1])
    ask(tab, "?")
    assert read(tab, ".error p") == ["The server cannot be reached. Is it still running?"]
    with standing_in(server, port):
        press(tab, "Try again")
        tab.until(f"{IDLE} && document.querySelector('.text').textContent")
    assert texts(tab) == ["I am math."]


def test_a_page_whose_list_failed_asks_for_it_again(tab, server):
    server.refuses["/v1/models"] = [refusal(503, "The experts are being loaded.")]
    opened(tab, server)
    assert read(tab, "#notice .error p") == ["The experts are being loaded."]
    send(tab, "?")
    tab.until("document.querySelector('.text')?.getAttribute('aria-busy') === 'false'")
    assert texts(tab) == ["I am math."]
    assert read(tab, "#notice .error") == []


@pytest.mark.parametrize("policy", [True, False], ids=["policy", "no policy"])
def test_what_others_wrote_is_text(tab, server, policy):
    """With and without the policy: each of the two has to hold alone."""
    bad = f"{TAG}{ESCAPES}"
    if not policy:
        del server.headers["content-security-policy"]
    server.models += [f"base:{bad}"]
    server.route = {"expert": TAG, "confidence": 0.5, "subdomains": [{"name": bad, "probability": 0.5}]}
    server.says["auto"] = [bad, bad]
    opened(tab, server)
    assert ask(tab, bad) == neutral.escape_terminal(bad + bad)
    assert read(tab, ".asked") == [neutral.escape_terminal(bad)]
    assert read(tab, ".who b") == [TAG]
    tab.until("document.querySelector('.route')")
    assert read(tab, ".route li span:first-child") == [neutral.escape_terminal(bad)]
    assert neutral.escape_terminal(bad) in read(tab, "#expert option")
    server.refuses["auto"] = [refusal(400, bad)]
    ask(tab, "?")
    assert read(tab, ".error p") == [neutral.escape_terminal(bad)]
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert tab.run("window.caught") is None


def test_the_policy_lets_nothing_else_run(tab, server):
    added = b"<script>window.caught = 1</script><p id=led onclick='window.caught = 2' style='color: red'>x</p></body>"
    server.html = server.html.replace(b"</body>", added)
    opened(tab, server)
    tab.run("document.getElementById('led').click()")
    assert tab.run("window.caught") is None
    assert tab.run("getComputedStyle(document.getElementById('led')).color") != "rgb(255, 0, 0)"
    blocked = "try {{ {}; 'it ran' }} catch (error) {{ error.name }}"
    assert tab.run(blocked.format("document.body.innerHTML = '<b>x</b>'")) == "TypeError"
    assert tab.run("fetch('http://127.0.0.1:9/').then(() => 'it ran', () => 'refused')") == "refused"
    assert any("Content Security Policy" in line for line in tab.complaints())


def test_text_is_shown_as_the_rest_of_the_project_shows_it(page, server):
    ranges = [(0, 0x200), (0x600, 0x630), (0x1800, 0x1810), (0x1FF0, 0x2080), (0xFEF0, 0x10010), (0xDFFFA, 0xE0090)]
    text = "".join(chr(number) for one, end in ranges for number in range(one, end))
    escaped = "".join(f"\\u{{{ord(character):x}}}" for character in text)
    assert page.run(f'printable("{escaped}")') == neutral.escape_terminal(text)
    assert re.search(r"\\x1b", neutral.escape_terminal(text))
    assert page.run(r"printable('\ud800a') === '\\ud800a'")
