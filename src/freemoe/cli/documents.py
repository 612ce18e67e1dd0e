"""Plain data as a JSON document with a schema, or as lines for people: the same keys, the units beside the numbers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freemoe.core.numbers import format_bytes

FORMAT = 1
"""Of every document; `freemoe.cli.schemas` has their types."""


def print_json(command: str, value: Mapping[str, Any]) -> None:
    """Print the one JSON document of a command on standard output.

    Paths become text; NaN and infinity, which JSON does not know, become null.
    """
    document = {"schema": f"freemoe.{command}/{FORMAT}", **_to_json_value(value)}
    # Characters beyond ASCII are escaped, so that no terminal obeys one; DEL is ASCII.
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False).replace("\x7f", "\\u007f") + "\n")


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lines_of(fields: Mapping[str, Any]) -> list[str]:
    """A line per key; the key's last word is the unit of a number: ``_bytes``, ``_seconds``, ``_share``, ``_tokens``."""
    lines: list[str] = []
    for key, value in fields.items():
        name, unit = _split_unit(key)
        if key == "warnings":  # as the run itself says them
            lines += value
        elif isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
            lines.append(f"{name}:")
            lines += [
                "  " + "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
                for row in value
            ]
        else:
            lines.append(f"{name}: {_format_value(value, unit)}")
    return lines


def _split_unit(key: str) -> tuple[str, str]:
    stem, _, last = key.rpartition("_")
    if stem and last in ("bytes", "seconds", "share", "tokens"):
        return stem.replace("_", " "), last
    return key.replace("_", " "), last if last == "bytes" else ""


def _format_value(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        parts = ((_split_unit(str(k)), v) for k, v in value.items())
        said = (
            f"{n} ({_format_value(v, u or unit)})" if isinstance(v, Mapping) else f"{n} {_format_value(v, u or unit)}"
            for (n, u), v in parts
        )
        return ", ".join(said) or "none"
    if isinstance(value, list | tuple):
        said = [_format_value(v, unit) for v in value]
        return ("; " if any("," in s for s in said) else ", ").join(said) or "none"
    if not isinstance(value, int | float):
        return str(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit != "seconds":
        return (f"{value:,} {unit}" if isinstance(value, int) else f"{value:,.4g} {unit}").rstrip()
    if value < 90:
        return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.0f} s"
    return f"{value / 60:.0f} minutes" if value < 5400 else f"{value / 3600:.1f} hours"
