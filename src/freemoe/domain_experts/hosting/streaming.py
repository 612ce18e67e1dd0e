"""A text that is read while it is written."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from freemoe.core.errors import BusyError
from freemoe.core.threads import model_lock_of

Pieces = queue.SimpleQueue[tuple[str, Any]]
"""``("piece", text)`` as often as there are some, then ``("end", expert)`` or ``("error", exception)``."""


class TextStream:
    """The pieces of a text, in order; a thread of its own writes them.

    The writer has the base's turn from the first to the last token, whether anyone reads or not: a reader that stalls holds up
    other threads no longer than the text takes, and the pieces wait for it in memory. `close`, leaving a ``with`` block
    and letting go of the stream stop the writer after the token it is at; an error of the writer is raised here.
    """

    def __init__(self, write: Callable[[Pieces, threading.Event], str]) -> None:
        self._pieces: Pieces = queue.SimpleQueue()
        self._stop, self._over = threading.Event(), False
        self._expert: str | None = None
        # The writer does not know this object, which ends when its last reader does.
        self._writer = threading.Thread(target=_run_writer, args=(write, self._pieces, self._stop), name="freemoe text")
        self._writer.start()

    @property
    def expert(self) -> str | None:
        """The expert that wrote the text; None before its end."""
        return self._expert

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        if self._over:
            raise StopIteration
        kind, said = self._pieces.get()
        if kind == "piece":
            return said
        self._over = True
        self._writer.join()
        if kind == "error":
            raise said
        self._expert = said
        raise StopIteration

    def close(self) -> None:
        """Stop writing; when this returns, the base is free for others."""
        self._over = True
        self._stop.set()
        self._writer.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        # Nothing is waited for: who collects garbage may be the one whom the writer waits for.
        if stop := getattr(self, "_stop", None):
            stop.set()


class _QueueStreamer(TextStreamer):
    """Puts words into a queue as soon as they are whole."""

    def __init__(self, tokenizer: Any, pieces: Pieces) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.pieces = pieces

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.pieces.put(("piece", text))


class _StopOnEvent(StoppingCriteria):
    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), self.stop.is_set(), dtype=torch.bool, device=input_ids.device)


def _run_writer(write: Callable[..., str], pieces: Pieces, stop: threading.Event) -> None:
    try:
        pieces.put(("end", write(pieces, stop)))
    except BaseException as error:
        pieces.put(("error", error))


def start_stream(moe: Any, prompt: str, options: dict[str, Any]) -> TextStream:
    """A `FreeMoE`'s text, piece by piece. Options are those of its ``generate_text``.

    Raises:
        BusyError: This thread has the base itself.
    """
    turn = model_lock_of(moe.model)
    if turn.is_owned():
        raise BusyError(
            "stream_text writes on a thread of its own, which would wait for this block to end: call it outside of `with "
            "moe.expert(...)` and `moe.turn()`, and pass expert=NAME."
        )
    criteria = options.get("stopping_criteria") or []

    def generate_pieces(pieces: Pieces, stop: threading.Event) -> str:
        with turn.hold_lock(moe.threads, stop):
            told = {
                "streamer": _QueueStreamer(moe.tokenizer, pieces),
                "stopping_criteria": StoppingCriteriaList([*criteria, _StopOnEvent(stop)]),
            }
            return moe.generate_text(prompt, **(options | told))[1]

    return TextStream(generate_pieces)
