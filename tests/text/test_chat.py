"""The chat template writes prompt and response; whatever it refuses is told with the row."""

import signal
import subprocess
import sys

import pytest

from freemoe.compat import templates
from freemoe.core.errors import DataError, RecipeError
from freemoe.text.chat import as_prompt, as_turn, uses_template
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

USER = [{"role": "user", "content": "hi"}]


def tokenizer(template=CHAT_TEMPLATE):
    made = tiny_tokenizer()
    made.chat_template = template
    return made


def test_prompt_and_response_are_the_whole():
    prompt, response = as_turn(tokenizer(), USER, "yes", "x")
    assert prompt == as_prompt(tokenizer(), USER, "x") == "[user]hi[/][assistant]"
    assert prompt + response == as_prompt(
        tokenizer(), [*USER, {"role": "assistant", "content": "yes"}], "x", whole=True
    )
    assert response == "yes[/]"


@pytest.mark.parametrize(
    ("mode", "conversation", "with_template", "without"),
    [
        ("auto", True, True, False),
        ("auto", False, False, False),
        ("on", False, True, None),
        ("off", True, False, False),
    ],
)
def test_when_it_is_used(mode, conversation, with_template, without):
    assert uses_template(tokenizer(), mode, conversation) is with_template
    if without is None:
        with pytest.raises(RecipeError, match="has no chat template"):
            uses_template(tokenizer(None), mode, conversation)
    else:
        assert uses_template(tokenizer(None), mode, conversation) is without


def test_a_template_that_raises_names_the_row():
    raises = tokenizer("{{ raise_exception('system messages are not known') }}")
    with pytest.raises(
        DataError, match=r"row 3: .*refuses these messages \(user\): system messages are not known.*--chat off"
    ):
        as_prompt(raises, USER, "row 3")


def test_a_template_that_rewrites_the_prompt_is_refused():
    rewrites = tokenizer("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match="writes the prompt otherwise"):
        as_turn(rewrites, USER, "yes", "row 3")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 'a' * 10 ** 10 }}", "bytes of memory"),
        ("{{ '%1000000000d' | format(1) }}", "bytes of memory"),
        ("{{ lipsum(10 ** 8) }}", "was not done after"),
        ("{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "was not done after"),
        ("{% if messages[0].content == 'hi' %}{{ 'a' * 2 ** 25 }}{% endif %}", "more than 16,777,216 characters"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_has_bounds_and_the_next_one_is_rendered(template, why, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.3 if "not done" in why else 30.0)
    with pytest.raises(DataError, match=f"chat template refuses these messages .*{why}"):
        as_prompt(tokenizer(template), USER, "row 3")
    monkeypatch.undo()
    assert as_prompt(tokenizer(), USER, "x") == "[user]hi[/][assistant]"


def test_the_process_writes_what_the_tokenizer_would():
    made = tokenizer("{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% endfor %}")
    messages = [*USER, {"role": "assistant", "content": "é\n<s>"}]
    wanted = made.apply_chat_template(messages, tokenize=False)
    assert as_prompt(made, messages, "x", whole=True) == wanted
    assert wanted.startswith(made.bos_token)


def test_no_process_is_left_behind():
    program = """
import atexit, os
from types import SimpleNamespace
from freemoe.compat import templates
# What is registered first is done last.
atexit.register(lambda: print(templates._template_process(os.getpid())._process.poll()))
tokenizer = SimpleNamespace(special_tokens_map={}, get_chat_template=lambda *_: "{{ messages[0].content }}")
print(templates.render_template(tokenizer, [{"role": "user", "content": "hi"}]))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"hi\n{-signal.SIGKILL}\n", "")
