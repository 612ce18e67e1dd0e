"""Chat templates rendered by a process of their own, in bounds of time, memory and length.

A template may loop for ever, or ask for a string of 10 GB, for one message and not for another: so none is rendered here, and it does
not help to try one first. The process is started once, and again where it was ended.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS, START = 5.0, 120.0
"""For one conversation, and for the process to be ready."""

_SOURCE = str(Path(__file__).parents[2])


def render_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
    """Messages as a tokenizer's chat template writes them."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    template = tokenizer.get_chat_template(None, None)
    conversation = [dict(message) for message in messages]
    return _template_process(os.getpid()).render_request(
        {**special, **how, "chat_template": template, "conversations": [conversation]}
    )


@functools.cache
def _template_process(process: int) -> _TemplateProcess:
    """The one of this process: what was forked does not share its parent's."""
    child = _TemplateProcess()
    atexit.register(lambda: child.kill_process() if os.getpid() == process else None)
    return child


class _TemplateProcess:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Any = None

    def render_request(self, request: dict[str, Any]) -> str:
        """One conversation, one at a time."""
        line = json.dumps(request)
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                path = os.pathsep.join(filter(None, (_SOURCE, os.environ.get("PYTHONPATH"))))
                self._process = subprocess.Popen(
                    # Without -P the current folder's modules would come first.
                    [sys.executable, "-P", "-m", "freemoe.compat.template_child"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="utf-8",
                    env={**os.environ, "PYTHONPATH": path},
                )
                self._exchange_lines("", START)
            said = self._exchange_lines(line + "\n", SECONDS)
        if "text" not in said:
            raise ValueError(said["error"])
        return said["text"]

    def kill_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()

    def _exchange_lines(self, line: str, seconds: float) -> dict[str, Any]:
        """Write a line and read the answer; the process is ended where that takes too long."""
        clock = threading.Timer(seconds, self._process.kill)
        clock.daemon = True
        clock.start()
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:
            # Stopped in between: its answer would be taken for the next one's.
            self.kill_process()
            raise
        finally:
            clock.cancel()
        if not answer:
            self.kill_process()
            raise ValueError(f"it was not done after {seconds:g} seconds, or brought its process down")
        return json.loads(answer)
