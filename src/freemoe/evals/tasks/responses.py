"""Responses of conversations as documents: each is scored after what comes before it, in nats per token of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from freemoe.core.errors import DataError
from freemoe.text.chat import as_turn
from freemoe.text.shapes import ConversationItem

MOST_SCORED, MOST_TOKENS = 512, 2048
"""Tokens of a response that are scored, its first, and tokens of a document, cut from the prompt's left; less where the tokenizer
says that the model holds less."""


def response_parts(where: str, item: ConversationItem, tokenizer: Any, template: bool) -> Iterator[dict[str, Any]]:
    """The fields of a `Document` for every turn of a conversation in which the assistant answers.

    Raises:
        DataError: The template refuses the messages, or a response has no token.
    """
    if tokenizer is None:
        raise DataError(
            f"{where}: responses are scored token by token, and no tokenizer was given; pass the model's: "
            "load_domain(..., tokenizer=tokenizer)."
        )
    for turn in item.turns:
        prompt, response = turn.prompt, turn.gap + turn.response
        if template:
            prompt, response = as_turn(tokenizer, turn.messages, turn.response, where)
        ids, given = _encode_response(tokenizer, prompt, response, template)
        if len(ids) == given:
            raise DataError(f"{where}: the response {response!r:.60} has no token of its own. Leave the row out.")
        yield {"prompt": prompt, "answers": (response,), "reference": response, "tokens": ids, "given": given}


def _encode_response(tokenizer: Any, prompt: str, response: str, template: bool) -> tuple[tuple[int, ...], int]:
    """Token ids of prompt and response, and how many are the prompt's; both cut to what is scored."""
    longest = tokenizer.model_max_length if 0 < tokenizer.model_max_length < 10**9 else MOST_TOKENS
    # A template writes its own tokens at the start; elsewhere the tokenizer's stand there, as before every prompt.
    head = tokenizer.encode(prompt, add_special_tokens=not template, verbose=False)
    if not head:  # the first token of a text that has nothing before it cannot be predicted
        head = [t for t in (tokenizer.bos_token_id, tokenizer.eos_token_id) if t is not None][:1]
    tail = tokenizer.encode(response, add_special_tokens=False, verbose=False)
    tail = tail[: min(MOST_SCORED, longest // 2)]
    head = head[-(min(MOST_TOKENS, longest) - len(tail)) :]
    return (*head, *tail), len(head)
