"""The chat template writes prompt and response; whatever it refuses is told with the row."""

from __future__ import annotations

import pytest

from freemoe.core.errors import DataError, RecipeError
from freemoe.text.chat import as_prompt, as_text, as_turn, uses_template
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

USER = [{"role": "user", "content": "hi"}]


def tokenizer(template=CHAT_TEMPLATE):
    made = tiny_tokenizer()
    made.chat_template = template
    return made


def test_prompt_and_response_are_the_whole():
    prompt, response = as_turn(tokenizer(), USER, "yes", "x")
    assert prompt == as_prompt(tokenizer(), USER, "x") == "[user]hi[/][assistant]"
    assert prompt + response == as_text(tokenizer(), [*USER, {"role": "assistant", "content": "yes"}], "x")
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
