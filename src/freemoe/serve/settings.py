"""What a server can be told: every option and limit with its default, bounds and help; where it listens, and who may come in."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from freemoe.core.errors import RecipeError

KEY = "FREEMOE_API_KEY"
"""The variable of the environment that holds the key."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class EngineLimits:
    """What the engine takes on."""

    context: int  # Tokens of a sequence at most, prompt and answer together
    batch: int = 16  # Sequences that are run side by side; each has a slot of the cache
    queue: int = 256  # Sequences that may wait for a slot
    prefill: int = 256  # Tokens of prompts that are read per step, so that running sequences do not stall
    pieces: int = 1024  # Events of a stream that are kept for a reader that does not read
    # Every sequence is computed by itself, so that its logits are the same bits whoever else asks
    batch_invariant: bool = False


@dataclass(frozen=True)
class RequestLimits:
    """What a request may ask for, and how long it may take."""

    bytes: int = 4 << 20
    seconds: float = 30  # Until its body is there, and until a reader takes the next piece of an answer
    choices: int = 128  # Answers to one request, prompts times ``n``
    stops: int = 16  # Stop texts of one request
    at_once: int = 512  # Requests that are open at one time


class ServeSettings(BaseModel):
    """What is served and within which limits: flags of `freemoe serve`, and ``args`` of an application of Ray Serve."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str = Field(description="Model or artefact: a folder, a GGUF file, or owner/name of the hub.")
    experts: list[str] = Field(
        [], description="Folder of experts, may be repeated; PREFIX=DIR puts PREFIX before their names."
    )
    expert_root: list[Path] = Field(
        [],
        description="Folder below which experts may be loaded while it runs, may be repeated. [those given at start]",
    )
    host: str = Field("127.0.0.1", description="Where to listen; another than this machine needs a key.")
    replicas: int = Field(1, ge=1, le=4096, description="With --on ray: each has a copy of the base.")
    max_batch: int = Field(EngineLimits.batch, ge=1, le=1024, description="Sequences that are written side by side.")
    context: int | None = Field(
        None, ge=2, description="Tokens of prompt and answer together. [the model's, at most 4096]"
    )
    queue: int = Field(EngineLimits.queue, ge=1, le=100_000, description="Sequences that may wait; the next gets 429.")
    prefill_tokens: int = Field(EngineLimits.prefill, ge=1, description="Tokens of prompts that are read per step.")
    batch_invariant: bool = Field(
        False, description="Compute every sequence by itself: the same bits whoever else asks, fewer tokens/s."
    )
    max_body_bytes: int = Field(RequestLimits.bytes, ge=1024, description="Bytes of a request.")
    patience_seconds: float = Field(RequestLimits.seconds, ge=0.1, description="For a slow body, and a slow reader.")
    drain_seconds: float = Field(30, ge=0, description="For running requests, after SIGTERM or ctrl-C.")
    threads: int | None = Field(None, ge=1, description="CPU threads.")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    dtype: str = Field("auto", description="auto, float32, bfloat16 or float16.")

    @property
    def request_limits(self) -> RequestLimits:
        """Of requests to one process."""
        return RequestLimits(self.max_body_bytes, self.patience_seconds)


def require_key(host: str, key: str | None) -> None:
    """Raise for a server that others could reach without a key."""
    if key is None:
        if host not in LOOPBACK:
            raise RecipeError(
                f"--host {host} can be reached by others, so the server needs a key: --api-key KEY, or better FREEMOE_API_KEY in the "
                "environment. Without one it listens on 127.0.0.1 alone."
            )
    elif len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise RecipeError("The API key has to be 8 or more printable ASCII characters without spaces.")


def require_free(host: str, port: int) -> None:
    """Raise where nothing can listen."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as found:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                found.bind(address)
    except (OSError, OverflowError) as error:
        raise RecipeError(
            f"Nothing can listen on --host {host} --port {port}: {error}. Choose another port, or end what listens there."
        ) from None


def address_of(host: str, port: int) -> str:
    """Where a browser finds a server."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
