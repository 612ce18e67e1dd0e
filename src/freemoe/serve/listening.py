"""Where a server listens, and who may come in: checked before anything is loaded, whichever engine serves."""

from __future__ import annotations

import socket

from freemoe.core.errors import RecipeError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def require_key(host: str, key: str | None) -> None:
    """Raise for a server that others could reach without a key.

    Raises:
        RecipeError: Also for a key that no header can carry.
    """
    if key is None:
        if host not in LOOPBACK:
            raise RecipeError(
                f"--host {host} can be reached by others, so the server needs a key: --api-key KEY, or better FREEMOE_API_KEY in the "
                "environment. Without one it listens on 127.0.0.1 alone."
            )
    elif len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise RecipeError("The API key has to be 8 or more printable ASCII characters without spaces.")


def require_free(host: str, port: int) -> None:
    """Raise where nothing can listen.

    Raises:
        RecipeError: With what the system says.
    """
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
