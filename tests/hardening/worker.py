"""A process of its own that answers: lines of JSON in, lines of JSON out. Whoever started it outlives it."""

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTUP = 300.0


class Worker:
    """Such a process, ready when it is made: a module's ``start(*arguments)`` returns the function that answers."""

    def __init__(self, module, *arguments, environment=None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hardening.worker", module, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            text=True,
        )
        self._answer(STARTUP)

    def ask(self, question, seconds):
        """Its answer; a TimeoutError where none came in time, an EOFError where it has ended."""
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
        except OSError:
            raise EOFError from None
        return self._answer(seconds)

    def _answer(self, seconds):
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        line = self.process.stdout.readline()
        if not line:
            raise EOFError
        return json.loads(line)

    def close(self):
        """End it where it has not ended; how it did."""
        self.process.kill()
        code = self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what it no longer read
                stream.close()
        return code


class Sampled:
    """What ``look`` returns every ``pause`` seconds of a ``with`` block."""

    def __init__(self, look, pause):
        self.seen: list[int] = []
        self._look, self._pause, self._over = look, pause, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self):
        while not self._over.wait(self._pause):
            self.seen.append(self._look())

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def main(module, arguments):
    """Answer until the input ends."""
    # What libraries print must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer = importlib.import_module(module).start(*json.loads(arguments))
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
