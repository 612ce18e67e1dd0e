"""The process that has programs run: a parent that may be harmed, so not the benchmark's own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from typing import Any

SLACK = 15.0
"""Seconds beyond a program's own that an answer may take; a parent that is slower hangs."""


def main() -> None:
    """Run what comes in, one JSON document a line; answer in the same way."""
    from freemoe.core.errors import SandboxError
    from freemoe.evals.sandbox.runner import run_tests

    for line in sys.stdin:
        asked = json.loads(line)
        try:
            result = run_tests(
                asked["program"], timeout=asked["timeout"], memory=asked["memory"], isolation=asked["isolation"]
            )
            answer = {"passed": result.passed, "status": result.status, "detail": result.detail}
        except SandboxError as error:
            answer = {"passed": False, "status": "refused", "detail": str(error)}
        print(json.dumps(answer), flush=True)


class Parent:
    """Such a process, seen from the benchmark."""

    def __init__(self, secret: str, temporary: str) -> None:
        code = "from benchmarks.sandbox.worker import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "FREEMOE_SECRET": secret, "TMPDIR": temporary},
            start_new_session=True,
            text=True,
        )

    def run(self, program: str, isolation: str, timeout: float, memory: int) -> dict[str, Any] | None:
        """What became of a program; None where this process did not live to say so, or hangs."""
        asked = {"program": program, "isolation": isolation, "timeout": timeout, "memory": memory}
        assert self.process.stdin
        assert self.process.stdout
        try:
            print(json.dumps(asked), file=self.process.stdin, flush=True)
        except OSError:
            return None
        ready = select.select([self.process.stdout], [], [], 3 * timeout + SLACK)[0]
        line = self.process.stdout.readline() if ready else ""
        return json.loads(line) if line else None

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()
