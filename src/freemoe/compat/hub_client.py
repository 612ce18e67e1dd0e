"""What freemoe asks of huggingface_hub and datasets beyond their documented names; in 1.31 to 2.4, and 3 to 5."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from freemoe.compat.names import quiet_loggers

# Function -> its argument for the number of tries after the first. Where a release has none, its own number stands.
_RETRIES = {
    "huggingface_hub.utils._http:http_backoff": "max_retries",
    "huggingface_hub.utils._http:http_stream_backoff": "max_retries",
    "huggingface_hub.file_download:http_get": "_nb_retries",
}


@contextlib.contextmanager
def limit_hub_retries(count: int) -> Iterator[None]:
    """Inside, the hub's client asks again ``count`` times at most, and does not report each time."""
    before = []
    for path, argument in _RETRIES.items():
        module, _, name = path.partition(":")
        defaults = getattr(getattr(import_module(module), name, None), "__kwdefaults__", None) or {}
        if argument in defaults:
            before.append((defaults, argument, defaults[argument]))
    try:
        for defaults, argument, _ in before:
            defaults[argument] = count
        with quiet_loggers("huggingface_hub"):
            yield
    finally:
        for defaults, argument, value in before:
            defaults[argument] = value


@contextlib.contextmanager
def hub_offline() -> Iterator[None]:
    """Inside, the hub's client and `datasets`, where it is loaded, look into their caches only."""
    from huggingface_hub import constants

    switches: list[Any] = [constants]
    if "datasets" in sys.modules:
        switches.append(import_module("datasets.config"))
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches:
            switch.HF_HUB_OFFLINE = True
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value
