"""The server's rival: vLLM with as many LoRA adapters as there are experts, on the same base, asked by the same clients.

vLLM needs other releases than freemoe, so it runs in an environment of its own (docs/vllm.md); ``$FREEMOE_VLLM_PYTHON`` names
the Python of that environment.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.compat import with_lora_adapters
from benchmarks.serve.material import NAMES
from freemoe.core.errors import DataError, FreeMoEError
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.models.weights import find_weights
from freemoe.serve.vllm import PYTHON

RANK = 8
_START_SECONDS = 600


def python_with_vllm() -> str | None:
    """The Python that the environment names; None where it names none.

    Raises:
        DataError: It cannot be run.
    """
    named = os.environ.get(PYTHON)
    if named and not os.access(named, os.X_OK):
        raise DataError(
            f"{PYTHON} is {named!r}, which cannot be run. Name the Python of an environment with vLLM, as "
            ".venv-vllm/bin/python (docs/vllm.md), or unset it."
        )
    return named or None


def write_adapters(folder: Path, moe: FreeMoE) -> None:
    """The base into ``folder/base``, and a random adapter beside every linear into ``folder/NAME`` for each expert."""
    moe.model.save_pretrained(folder / "base")
    moe.tokenizer.save_pretrained(folder / "base")
    linears = [w.name.removesuffix(".weight") for w in find_weights(moe.model)]
    with_lora_adapters(copy.deepcopy(moe.model), linears, RANK, list(NAMES)).save_pretrained(folder)


def command(python: str, folder: Path, slots: int, context: int, port: int) -> list[str]:
    """What starts vLLM's server on the adapters of a folder; its models are ``base`` and the experts' names."""
    return [
        python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
        "--model", str(folder / "base"), "--served-model-name", "base", "--dtype", "float32",
        "--max-model-len", str(context), "--max-num-seqs", str(slots), "--generation-config", "vllm",
        "--enable-lora", "--max-loras", str(len(NAMES)), "--max-lora-rank", str(RANK),
        "--lora-modules", *(f"{name}={folder / name}" for name in NAMES),
    ]  # fmt: skip


@contextlib.contextmanager
def vllm_serving(python: str, moe: FreeMoE, slots: int, context: int) -> Iterator[str]:
    """A server of vLLM; its address.

    Raises:
        FreeMoEError: It does not start; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_adapters(folder, moe)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port, log = free.getsockname()[1], folder / "log"
        hidden = {"PYTHONPATH", "VIRTUAL_ENV"}
        around = {k: v for k, v in os.environ.items() if k not in hidden}
        with log.open("wb") as out:
            server = subprocess.Popen(
                command(python, folder, slots, context, port),
                # Its workers are its children's children: they are ended with it, also where it dies while it starts.
                stdout=out, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
                env={**around, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"},
            )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, server, log)
            yield url
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() - began < _START_SECONDS and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.5)
    raise FreeMoEError(f"vLLM's server does not answer: {log.read_text(errors='replace').strip()[-1500:]}")
