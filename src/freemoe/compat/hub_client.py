"""What freemoe asks of huggingface_hub and datasets beyond their documented names; in 1.31 to 2.4, and 3 to 5."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module

from freemoe.compat.names import attribute_replaced, quiet_loggers

# Function -> its argument for the number of tries after the first. Where a release has none, its own number stands.
_RETRIES = {
    "huggingface_hub.utils._http:http_backoff": "max_retries",
    "huggingface_hub.utils._http:http_stream_backoff": "max_retries",
    "huggingface_hub.file_download:http_get": "_nb_retries",
}


@contextlib.contextmanager
def limit_hub_retries(count: int) -> Iterator[None]:
    """Inside, the hub's client asks again ``count`` times at most, and does not report each time."""
    with contextlib.ExitStack() as stack:
        for path, argument in _RETRIES.items():
            module, _, name = path.partition(":")
            defaults = getattr(getattr(import_module(module), name, None), "__kwdefaults__", None) or {}
            if argument in defaults:
                stack.enter_context(attribute_replaced(defaults, argument, count))
        stack.enter_context(quiet_loggers("huggingface_hub"))
        yield


@contextlib.contextmanager
def hub_offline() -> Iterator[None]:
    """Inside, the hub's client and `datasets`, where it is loaded, look into their caches only."""
    with contextlib.ExitStack() as stack:
        for name in ("huggingface_hub.constants", *(["datasets.config"] if "datasets" in sys.modules else [])):
            stack.enter_context(attribute_replaced(vars(import_module(name)), "HF_HUB_OFFLINE", True))
        yield
