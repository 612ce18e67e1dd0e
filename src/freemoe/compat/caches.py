"""The classes that a key-value cache of our own stands on; in ``transformers.cache_utils`` of 5.0 to 5.23.

A file of its own, because importing it imports transformers.
"""

from __future__ import annotations

from freemoe.compat.names import missing_name_error

try:
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
except ImportError as error:
    raise missing_name_error(
        "transformers", "transformers.cache_utils.DynamicLayer", "keep the keys and values of shared prefixes"
    ) from error

__all__ = ["Cache", "DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer"]
