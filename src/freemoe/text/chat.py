"""Chat templates: conversations as the text that a tokenizer's model was trained on, or as plain text.

``auto`` uses the template where the tokenizer has one and the data is a conversation; ``on`` always, and a prompt of any other
kind becomes one message of the user (as lm-eval's ``--apply_chat_template`` has it); ``off`` never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freemoe.compat.templates import render_template
from freemoe.core.errors import DataError, RecipeError

MODES = ("auto", "on", "off")

Message = Mapping[str, str]  # ``{"role": ..., "content": ...}``


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def uses_template(tokenizer: Any, mode: str, conversation: bool) -> bool:
    """Whether the template is used.

    Raises:
        RecipeError: It is asked for, and the tokenizer has none.
    """
    if mode == "on" and not has_template(tokenizer):
        raise RecipeError(
            "chat is 'on', and this model's tokenizer has no chat template. Use --chat off (or auto), or a base that was "
            "trained for chat."
        )
    return mode == "on" or (mode == "auto" and conversation and has_template(tokenizer))


def as_prompt(tokenizer: Any, messages: Sequence[Message], where: str, whole: bool = False) -> str:
    """Messages by the template, up to where the assistant's answer begins.

    ``whole``: the conversation ends with these messages.

    Raises:
        DataError: The template refuses them.
    """
    try:
        return render_template(tokenizer, messages, add_generation_prompt=not whole)
    except Exception as error:  # a template is a program: it raises what it likes
        roles = ", ".join(m["role"] for m in messages)
        raise DataError(
            f"{where}: the tokenizer's chat template refuses these messages ({roles}): {error}. Change the row, or use "
            "--chat off."
        ) from error


def as_turn(tokenizer: Any, messages: Sequence[Message], response: str, where: str) -> tuple[str, str]:
    """A prompt and the response to it by the template, its end of turn included.

    Raises:
        DataError: The template refuses them, or writes what came before otherwise once there is a response.
    """
    prompt = as_prompt(tokenizer, messages, where)
    whole = as_prompt(tokenizer, [*messages, {"role": "assistant", "content": response}], where, whole=True)
    if not whole.startswith(prompt):
        raise DataError(
            f"{where}: the tokenizer's chat template writes the prompt otherwise once the response is there, so the two cannot "
            "be told apart. Use --chat off."
        )
    return prompt, whole[len(prompt) :]


def plain_prompt(messages: Sequence[Message]) -> str:
    """Messages without a template, up to where the assistant's answer begins."""
    return "".join(f"{m['role'].capitalize()}: {m['content']}\n\n" for m in messages) + "Assistant:"
