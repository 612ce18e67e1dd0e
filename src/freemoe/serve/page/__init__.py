"""The page at ``/`` of the server: one static file, and the headers that let it do what it does and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def load_page() -> tuple[bytes, Mapping[str, str]]:
    """What to answer to ``GET /``: the HTML, UTF-8, and its headers.

    They hold the type, and a Content-Security-Policy under which only this file's own script and style run, nothing is loaded, and
    only this server is talked to.
    """
    html = resources.files(__name__).joinpath("index.html").read_text(encoding="utf-8")
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": content_security_policy(html),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return html.encode(), MappingProxyType(headers)


def content_security_policy(html: str) -> str:
    """The policy of a page that stands in one file: its inline scripts and styles by their SHA-256, no other.

    The page has line feeds as its line ends: so a browser takes the hash.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, inside in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    script, style = (" ".join(hashes[kind]) or "'none'" for kind in ("script", "style"))
    rules = [
        "default-src 'none'",
        f"script-src {script}",
        f"style-src {style}",
        "connect-src 'self'",
        "img-src data:",  # the empty icon, so that none is asked for
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text cannot become HTML, not even by mistake.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return "; ".join(rules)
