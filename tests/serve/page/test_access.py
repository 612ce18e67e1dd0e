"""The page in a browser: on a phone and a desk, light and dark, by keyboard alone, read aloud, without movement.

Screenshots are kept in the folder that FREEMOE_SCREENSHOTS names.
"""

import os
import threading
from pathlib import Path

import pytest

from tests.chromium import STICKING_OUT
from tests.serve.page.stand_in import UNTIL_GONE, refusal
from tests.serve.page.using import IDLE, ask, choose, opened, press, read, send, texts

pytestmark = pytest.mark.browser

LONG = "an-expert-with-a-name-that-nobody-would-break-" * 3

TOO_FAINT = """(() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = (e) => { for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || e.matches('input, textarea, select');
    if (!own || !e.getClientRects().length || e.disabled || e.matches('script, style, option')) continue;
    const [one, other] = [light(parse(getComputedStyle(e).color)), light(paper(e))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    if (ratio < 4.5) found.push(`${e.tagName}.${e.className} ${ratio.toFixed(2)}`);
  }
  return found;
})()"""


def keep(tab, name):
    kept = os.environ.get("FREEMOE_SCREENSHOTS")
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
        tab.picture(Path(kept) / f"serve-{name}.png")


def fill_the_page(tab, server):
    """Everything there is: a conversation, the router, two sides, an error, long words."""
    server.models.append(f"base:{LONG}")
    server.route["subdomains"].append({"name": LONG, "probability": 0.001})
    server.says["auto"] = ["The word is\n", "unbreakable" * 20, " and a line that is long enough to be broken. " * 4]
    ask(tab, "Which word? " * 12)
    tab.until("document.querySelector('.route')")
    tab.click("document.getElementById('beside')")
    server.refuses["base"] = [refusal(429, f"Too many requests for {LONG}.", {"retry-after": "60"})]
    ask(tab, "x" * 300)
    tab.until("document.querySelectorAll('.route').length === 2")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_can_be_read(tab, server, width, theme):
    opened(tab, server, width, theme)
    keep(tab, f"{width}-{theme}-first")
    fill_the_page(tab, server)
    keep(tab, f"{width}-{theme}")
    for state in ("the page", "its settings"):
        if state == "its settings":
            press(tab, "Settings")
            keep(tab, f"{width}-{theme}-settings")
        seen = tab.run(STICKING_OUT)
        assert seen["room"] == width, state
        assert seen["scroll"] <= width, state
        assert seen["found"] == [], state
        assert tab.run(TOO_FAINT) == [], state
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[theme]
    assert tab.run("getComputedStyle(document.body).backgroundColor") == paper


def test_the_check_of_contrast_sees_what_is_faint(page, server):
    assert page.run(TOO_FAINT) == []
    page.run("document.querySelector('h1').style.color = '#8a8a8a'")
    assert len(page.run(TOO_FAINT)) == 1


def test_the_reader_may_choose_light_or_dark(tab, server):
    opened(tab, server, theme="dark")
    state = "[getComputedStyle(document.body).backgroundColor, document.getElementById('theme').getAttribute('aria-pressed')]"
    assert tab.run(state) == ["rgb(20, 23, 26)", "true"]
    press(tab, "Dark")
    assert tab.run(state) == ["rgb(255, 255, 255)", "false"]
    opened(tab, server, theme="dark")  # remembered
    assert tab.run(state) == ["rgb(255, 255, 255)", "false"]
    press(tab, "Dark")
    assert tab.run(state) == ["rgb(20, 23, 26)", "true"]


def focused(tab):
    """Which control has the focus; that it can be seen is asserted."""
    name, outline, width = tab.run(
        "(() => { const e = document.activeElement, s = getComputedStyle(e);"
        " return [e.id || e.textContent, s.outlineStyle, parseFloat(s.outlineWidth)]; })()"
    )
    assert outline == "solid", name
    assert width >= 2, name
    return name


def test_everything_is_done_by_keyboard(page, server):
    assert focused(page) == "prompt"
    page.type("One")
    page.press("Enter")
    page.until(f"document.querySelector('.route') && {IDLE}")
    # Backwards over what there is, and all of it can be seen: the router's bars, the bar above.
    passed = []
    while not passed or passed[-1] != "expert":
        page.press("Tab", shift=True)
        passed.append(focused(page))
        assert len(passed) < 10
    assert passed == ["Router: math, 83 % sure", "theme", "settings", "fresh", "beside", "expert"]
    page.press("ArrowDown")
    assert page.run("document.getElementById('expert').value") == "base"
    page.press("Tab")
    page.press(" ")
    assert page.run("document.getElementById('beside').checked")
    page.press(" ")
    server.says["base"] = ["a", UNTIL_GONE]
    while focused(page) != "prompt":
        page.press("Tab")
    page.type("Two")
    page.press("Tab")
    assert focused(page) == "send"
    page.press("Enter")
    page.until("document.querySelectorAll('.text')[1]?.textContent.length > 3")
    assert focused(page) == "prompt"
    page.press("Tab")
    assert focused(page) == "stop"
    page.press("Enter")
    page.until(IDLE)
    assert focused(page) == "prompt"
    assert [body["model"] for body in server.bodies()] == ["auto", "base"]
    assert server.gone.wait(5)


def test_the_settings_keep_the_keyboard_and_give_it_back(page, server):
    page.run("document.getElementById('settings').focus()")
    page.press("Enter")
    seen = [focused(page)]
    for _ in range(5):
        page.press("Tab")
        seen.append(focused(page))
    assert seen == ["max-tokens", "temperature", "seed", "key", "cancel", "Save"]
    page.press("Escape")
    assert not page.run("document.getElementById('dialog').open")
    assert focused(page) == "settings"


def test_every_control_has_a_name_and_answers_are_read_aloud(page, server):
    more = threading.Event()
    server.says["auto"] = ["Hello", more]
    send(page, "Hi")
    page.until("document.querySelector('.text')?.textContent === 'Hello'")
    # Read when it is complete, not letter by letter.
    live = "(() => { const e = document.querySelector('.text'); return [e.ariaLive, e.ariaBusy]; })()"
    assert page.run(live) == ["polite", "true"]
    more.set()
    page.until(IDLE)
    assert page.run(live) == ["polite", "false"]
    assert page.run("document.getElementById('status').getAttribute('role')") == "status"
    named = {}
    press(page, "Settings")
    inside = page.ask("Accessibility.getFullAXTree")["nodes"]
    page.press("Escape")
    for node in [*inside, *page.ask("Accessibility.getFullAXTree")["nodes"]]:
        if not node.get("ignored"):
            named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "checkbox", "combobox", "textbox", "spinbutton", "dialog", "article", "region"):
        assert named.get(role), f"no {role}; there are {sorted(named)}"
        assert all(named[role]), f"a {role} has no name: {named[role]}"
    assert {"Prompt", "API key"} <= set(named["textbox"])
    assert set(named["combobox"]) == {"Expert"}
    assert "Answer of math" in named["region"]


@pytest.mark.parametrize(("motion", "moving"), [("reduce", "none"), ("no-preference", "blink")])
def test_nothing_moves_for_those_who_want_no_movement(tab, server, motion, moving):
    more = threading.Event()
    server.says["auto"] = ["a", more]
    opened(tab, server, motion=motion)
    send(tab, "?")
    tab.until("document.querySelector('.text')?.textContent")
    assert tab.run("getComputedStyle(document.querySelector('.text'), '::after').animationName") == moving
    tab.until("document.querySelector('.share')")
    lasts = "0s" if moving == "none" else "0.25s"
    assert tab.run("getComputedStyle(document.querySelector('.share')).transitionDuration") == lasts
    more.set()
    tab.until(IDLE)


def test_the_end_is_followed_until_the_reader_goes_elsewhere(page, server):
    more, last = threading.Event(), threading.Event()
    lines = "line\n" * 80
    server.says["auto"] = [lines, more, lines, last, lines]
    left = "(() => { const s = document.scrollingElement; return s.scrollHeight - s.scrollTop - s.clientHeight; })()"
    send(page, "?")
    page.until("document.querySelector('.text')?.textContent.length === 400")
    page.until(f"{left} < 2")
    more.set()
    page.until("document.querySelector('.text').textContent.length === 800")
    page.until(f"{left} < 2")
    page.run("scrollTo(0, 100)")
    last.set()
    page.until(IDLE)
    assert page.run("document.scrollingElement.scrollTop") == 100
    assert len(texts(page)[0]) == 1200
    choose(page, "base:law")
    ask(page, "back to the end")
    page.until(f"{left} < 2")
    assert read(page, ".who")[1] == "law"
