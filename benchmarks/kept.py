"""Records of what is measured once: one JSON file each, and the patterns of ``--only`` that choose among their names."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from freemoe.core.files import write_atomic


def read_record(path: Path, identity: str | None = None) -> dict[str, Any] | None:
    """A record; None where there is none, or one that cannot be read or has another ``identity`` than is asked for."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = isinstance(record, dict) and (identity is None or record.get("identity") == identity)
    return record if same else None


def keep_record(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write a record whole, or not at all; returns it as it will be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record)
    write_atomic(path, text.encode())
    return json.loads(text)


def matches(name: str, only: str | None) -> bool:
    """Whether a name is asked for: everything is without patterns; a name may have commas, as those that part patterns."""
    return only is None or any(fnmatch(name, pattern) for pattern in (only, *only.split(",")))
