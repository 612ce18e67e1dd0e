"""The page in a browser: a conversation, its experts, the router, two answers beside each other."""

import re
import threading

import pytest

from tests.serve.page.stand_in import UNTIL_GONE, refusal
from tests.serve.page.using import IDLE, ask, choose, fill, opened, press, read, send, texts

pytestmark = pytest.mark.browser

BUSY = "document.querySelector('.text').getAttribute('aria-busy')"


def test_an_answer_comes_piece_by_piece(page, server):
    more = threading.Event()
    server.says["base:math"] = ["Twelve", more, " and", " two"]
    choose(page, "base:math")
    send(page, "How many?")
    page.until("document.querySelector('.text')?.textContent === 'Twelve'")
    assert page.run(BUSY) == "true"
    assert page.run("document.getElementById('status').textContent") == "Answering …"
    more.set()
    page.until(IDLE)
    assert texts(page) == ["Twelve and two"]
    assert page.run(BUSY) == "false"
    assert read(page, ".asked") == ["How many?"]
    assert read(page, ".who") == ["math"]
    assert re.fullmatch(r"3 tokens · [\d.]+ tokens/s · first after [\d.]+ s", read(page, ".figures")[0])
    assert page.run("document.getElementById('prompt').value") == ""
    how = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 256, "temperature": 0}
    messages = [{"role": "user", "content": "How many?"}]
    assert server.bodies() == [{"model": "base:math", "messages": messages, **how}]
    assert server.asked[0].key is None
    assert page.complaints() == []


def test_a_conversation_goes_on_with_another_expert_and_begins_anew(page, server):
    choose(page, "base:math")
    assert ask(page, "One") == "I am math."
    choose(page, "base:law")
    assert ask(page, "Two") == "I am law."
    assert read(page, ".who") == ["math", "law"]
    asked = server.bodies()[1]
    assert asked["model"] == "base:law"
    said = [(m["role"], m["content"]) for m in asked["messages"]]
    assert said == [("user", "One"), ("assistant", "I am math."), ("user", "Two")]
    press(page, "New")
    assert texts(page) == []
    assert page.run("document.activeElement.id") == "prompt"
    ask(page, "Three")
    assert [m["content"] for m in server.bodies()[2]["messages"]] == ["Three"]


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_what_came_and_lets_the_server_go(page, server, how):
    server.says["auto"] = ["So ", UNTIL_GONE]
    send(page, "Go on for ever")
    page.until("document.querySelector('.text')?.textContent.startsWith('So more')")
    press(page, "Stop") if how == "button" else page.press("Escape")
    page.until(IDLE)
    assert server.gone.wait(5)
    assert read(page, ".figures")[0].endswith("stopped")
    assert read(page, ".error") == []
    assert read(page, "#status") == ["Stopped."]
    assert page.run("document.activeElement.id") == "prompt"
    kept = texts(page)[0]
    server.says["auto"] = ["Yes."]
    assert ask(page, "And now?") == "Yes."
    assert server.bodies()[1]["messages"][1] == {"role": "assistant", "content": kept}


def test_nothing_is_sent_twice_nor_empty(page, server):
    more = threading.Event()
    server.says["auto"] = ["a", more]
    send(page, "  ")
    send(page, "One")
    send(page, "Two")  # while the first is answered
    assert page.run("document.getElementById('prompt').value") == "Two"
    more.set()
    page.until(IDLE)
    assert [body["messages"][-1]["content"].strip() for body in server.bodies()] == ["One"]


def test_enter_sends_and_shift_enter_begins_a_line(page, server):
    page.type("One")
    page.press("Enter", shift=True)
    page.type("two")
    assert server.asked == []
    # An input method's own Enter takes a word, and sends nothing.
    composing = "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true})"
    assert page.run(f"document.getElementById('prompt').dispatchEvent({composing})")
    page.press("Enter")
    page.until(f"document.querySelector('.turn') && {IDLE}")
    assert [body["messages"][0]["content"] for body in server.bodies()] == ["One\ntwo"]


def test_the_list_begins_with_auto_and_names_each_expert_once(tab, server):
    server.models = ["base:law", "law", "base", "base:math", "auto", "base:math+law"]
    opened(tab, server)
    assert read(tab, "#expert option") == ["auto", "base", "law", "math", "math+law"]
    assert tab.run("document.getElementById('expert').value") == "auto"
    # Experts come and go while the server runs; the choice stays where it can.
    choose(tab, "base:math")
    server.models = ["auto", "base", "base:math", "base:new"]
    tab.run("document.dispatchEvent(new Event('visibilitychange'))")
    tab.until("document.getElementById('expert').options.length === 4")
    assert read(tab, "#expert option") == ["auto", "base", "math", "new"]
    assert tab.run("document.getElementById('expert').value") == "base:math"


def test_the_router_says_who_and_how_sure(page, server):
    assert ask(page, "2 + 2?") == "I am math."
    assert read(page, ".who") == ["math chosen by the router, 83 % sure"]
    page.until("document.querySelector('.route')")
    assert read(page, ".route summary") == ["Router: math, 83 % sure"]
    assert read(page, ".route li") == ["math83 %", "law17 %"]
    ratio = page.run(
        "(() => { const [a, b] = [...document.querySelectorAll('.share')].map(e => parseFloat(e.style.width)); return a / b; })()"
    )
    assert ratio == pytest.approx(0.834 / 0.166)
    assert server.bodies("/v1/freemoe/route") == [{"messages": [{"role": "user", "content": "2 + 2?"}]}]
    # Chosen by hand: the router is asked all the same, but chose nothing.
    choose(page, "base:law")
    ask(page, "And 3?")
    assert read(page, ".who")[1] == "law"
    page.until("document.querySelectorAll('.route').length === 2")


def test_a_name_is_read_from_the_header_as_it_was_and_from_the_usage_where_there_is_none(tab, server):
    server.models.append("base:Größe 100%")
    opened(tab, server)
    choose(tab, "base:Größe 100%")
    ask(tab, "?")
    server.route["expert"] = "Größe 100%"
    choose(tab, "auto")
    ask(tab, "?")
    usage = {"completion_tokens": 40, "freemoe": {"expert": "law", "confidence": 1}}
    server.says["auto"] = ["a", {"choices": [], "usage": usage}]
    ask(tab, "?")
    assert read(tab, ".who") == [
        "Größe 100%",
        "Größe 100% chosen by the router, 83 % sure",
        "law chosen by the router, 100 % sure",
    ]


def test_no_more_bars_than_say_something(page, server):
    server.route["subdomains"] = [{"name": f"part {n}", "probability": n / 55} for n in range(1, 11)]
    ask(page, "?")
    page.until("document.querySelector('.route')")
    rows = read(page, ".route li")
    assert rows[0] == "part 1018 %"
    assert rows[-1] == "and 4 more"
    assert len(rows) == 7


def test_without_a_router_it_is_not_asked(tab, server):
    server.models = ["base", "base:math"]
    opened(tab, server)
    assert ask(tab, "?") == "I am base."
    assert server.bodies("/v1/freemoe/route") == []
    assert read(tab, ".route") == []


def test_a_router_that_fails_costs_no_answer(page, server):
    server.refuses["/v1/freemoe/route"] = [refusal(500, "The router gave NaN.")]
    assert ask(page, "?") == "I am math."
    page.until("document.querySelector('.turn').textContent.includes('No view of the router: The router gave NaN.')")


def test_two_answers_come_side_by_side_at_once(page, server):
    left, right = threading.Event(), threading.Event()
    server.says = {"base": ["I guess", left, " six"], "base:math": ["It is", right, " four"]}
    choose(page, "base:math")
    page.click("document.getElementById('beside')")
    send(page, "2 + 2?")
    # Both are under way before either may go on.
    page.until("[...document.querySelectorAll('.text')].map(e => e.textContent).join('|') === 'I guess|It is'")
    right.set()
    page.until("document.querySelectorAll('.text')[1].getAttribute('aria-busy') === 'false'")
    assert texts(page) == ["I guess", "It is four"]
    assert not page.run(IDLE)
    left.set()
    page.until(IDLE)
    assert texts(page) == ["I guess six", "It is four"]
    assert read(page, ".who") == ["base", "math"]
    for words in read(page, ".figures"):
        assert re.fullmatch(r"2 tokens · [\d.]+ tokens/s · first after [\d.]+ s", words)
    one, other = page.run(
        "[...document.querySelectorAll('.answer')].map(e => [e.getBoundingClientRect().x, e.getBoundingClientRect().y])"
    )
    assert one[1] == other[1]
    assert one[0] < other[0]
    assert sorted(body["model"] for body in server.bodies()) == ["base", "base:math"]
    page.until("document.querySelector('.route')")
    assert len(server.bodies("/v1/freemoe/route")) == 1
    # One prompt: what came before is not sent along, and it is not sent along later.
    ask(page, "3 + 3?")
    page.click("document.getElementById('beside')")
    ask(page, "4 + 4?")
    assert all(len(body["messages"]) == 1 for body in server.bodies())


def test_stop_ends_both_sides_and_a_failed_side_leaves_the_other(page, server):
    server.says = {"base": ["a", UNTIL_GONE], "base:math": ["b", UNTIL_GONE]}
    choose(page, "base:math")
    page.click("document.getElementById('beside')")
    send(page, "Go")
    page.until("[...document.querySelectorAll('.text')].map(e => e.textContent.length > 3).join() === 'true,true'")
    page.press("Escape")
    page.until(IDLE)
    assert all(words.endswith("stopped") for words in read(page, ".figures"))
    server.says = {}
    server.refuses["base"] = [refusal(500, "The base gave NaN.")]
    ask(page, "Again")
    assert texts(page)[2:] == ["", "I am math."]
    assert read(page, ".error p") == ["The base gave NaN."]


def test_experts_that_were_rejected_are_marked_and_not_counted(tab, server):
    server.models, server.rejected = ["base", "base:law", "base:math", "base:art"], ["base:math", "base:art"]
    opened(tab, server)
    assert read(tab, "#expert option") == ["base", "law", "math (rejected)", "art (rejected)"]
    assert read(tab, "#opening") == [
        "One base, 1 expert on the same weights. 2 more showed no reliable gain: they answer as the base."
    ]
    choose(tab, "base:math")
    assert ask(tab, "How many?") == "I am math."


def test_a_base_without_a_chat_template_continues_the_prompt(tab, server):
    server.template = False
    opened(tab, server)
    assert ask(tab, "Once upon") == "I am math."
    assert server.bodies("/v1/completions")[0]["prompt"] == "Once upon"
    assert "no chat template" in read(tab, "#opening")[0]
    assert tab.run("document.getElementById('opening').offsetHeight > 0")
    tab.until("document.querySelector('.route')")
    assert server.bodies("/v1/freemoe/route") == [{"prompt": "Once upon"}]
    # It is known now: no second try, and no earlier turn in the prompt.
    ask(tab, "There was")
    assert len(server.bodies()) == 1
    assert server.bodies("/v1/completions")[1]["prompt"] == "There was"


def test_settings_are_sent_checked_and_remembered(tab, server):
    opened(tab, server)
    press(tab, "Settings")
    assert tab.run("document.activeElement.id") == "max-tokens"
    fill(tab, "max-tokens", 0)
    press(tab, "Save")
    assert tab.run("document.getElementById('dialog').open")  # refused: at least one token
    fill(tab, "max-tokens", 7)
    fill(tab, "temperature", 0.25)
    fill(tab, "seed", 11)
    press(tab, "Save")
    assert not tab.run("document.getElementById('dialog').open")
    ask(tab, "a")
    opened(tab, server)
    ask(tab, "b")
    for body in server.bodies():
        assert (body["max_tokens"], body["temperature"], body["seed"]) == (7, 0.25, 11)
    press(tab, "Settings")
    fill(tab, "max-tokens", 9)
    tab.press("Escape")  # nothing is taken over
    ask(tab, "c")
    assert server.bodies()[2]["max_tokens"] == 7


def test_tokens_without_text_are_counted_and_not_timed(page, server):
    usage = {"choices": [], "usage": {"completion_tokens": 5}}
    server.says["auto"] = [usage, {"choices": [{"delta": {"role": "assistant"}}]}]
    ask(page, "?")
    assert texts(page) == [""]
    assert read(page, ".figures") == ["5 tokens"]
    assert read(page, ".error") == []


def test_an_answer_that_was_cut_at_the_limit_says_so(page, server):
    server.says["auto"] = ["a", {"choices": [{"delta": {}, "finish_reason": "length"}]}]
    ask(page, "?")
    assert read(page, ".figures")[0].endswith("ended at the most tokens allowed")
