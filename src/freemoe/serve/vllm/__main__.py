"""``python -m freemoe.serve.vllm ARTEFACT [--base FOLDER] [vLLM's own options]``: vLLM's OpenAI server for a folder of ours."""

from __future__ import annotations

import argparse
import sys

from freemoe.core.errors import FreeMoEError
from freemoe.serve.vllm.settings import serve_command


def main(arguments: list[str] | None = None) -> None:
    """Become vLLM's server, as the arguments say."""
    import os

    parser = argparse.ArgumentParser(prog="python -m freemoe.serve.vllm", description=__doc__, allow_abbrev=False)
    parser.add_argument("artefact", help="folder that freemoe build, convert or trim wrote, or a plain model")
    parser.add_argument("--base", help="folder of the base; what the artefact names if absent")
    given, more = parser.parse_known_args(arguments)
    try:
        command = serve_command(given.artefact, given.base, more)
    except FreeMoEError as error:
        sys.exit(f"Error: {error}")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
