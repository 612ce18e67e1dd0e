"""A process that renders chat templates: a template is a program that came with a model, and has bounds here that it has nowhere else.

It reads a line of JSON for every conversation, and writes one. Memory and length are bounded here, time by `compat.templates`.
"""

from __future__ import annotations

import contextlib
import json
import sys

MEMORY = 1 << 30
"""Bytes that the process may have; it needs about 150 MB."""

MOST = 1 << 24
"""Characters of a rendered conversation at most."""


def main() -> None:
    """Answer until the input ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # The first one loads jinja, which is in nobody's time.
    render_jinja_template(conversations=[[]], chat_template="")
    # Windows has no such limits.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        try:
            text = render_jinja_template(**json.loads(line))[0][0]
            said = {"text": text} if len(text) <= MOST else {"error": f"it wrote more than {MOST:,} characters"}
        except MemoryError:
            said = {"error": f"it needs more than {MEMORY:,} bytes of memory"}
        except Exception as error:  # a template raises what it likes
            said = {"error": f"{error or type(error).__name__}"[:1000]}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
