"""Whether two folders hold the same: every file, byte by byte, without what is the time of day."""

import json

from freemoe.core.files import CARD, MANIFEST
from scripts.same_results import differences as values_differ
from tests.hardening.kill.systems import OF_A_RUN

TIMED = ("result.json", CARD)
"""Files that tell times; a manifest's checksums of them differ likewise."""

SPEEDS = ("prefill", "decode")
"""Entries of ``result.json``, wherever they stand, that are tokens per second."""

# How a model card tells a time or a speed.
_TOLD = (" ms", "seconds", "tokens/s", "as fast")


def differences(one, other):
    """Files of two finished folders that are not the same.

    Of ``result.json`` the entries `OF_A_RUN`, all milliseconds (``*_ms``) and `SPEEDS` are left out, of the model card the lines
    that are made of those, of the manifest the checksums of both and its own, and of the journal the units that are times.
    """
    names = [{str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} for folder in (one, other)]
    found = [f"{name} is in one of them only" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        pair = _plain(one / name), _plain(other / name)
        if pair[0] != pair[1]:
            where = values_differ(*pair) if isinstance(pair[0], dict) else ["bytes"]
            found.append(f"{name} has other contents ({', '.join(where)})")
    return found


def _untimed(value):
    """A JSON value without milliseconds and speeds."""
    if isinstance(value, dict):
        return {k: _untimed(v) for k, v in value.items() if not k.endswith("_ms") and k not in SPEEDS}
    return [_untimed(v) for v in value] if isinstance(value, list) else value


def _plain(path):
    """A file's contents without times."""
    blob = path.read_bytes()
    if path.name == "result.json":
        return _untimed({k: v for k, v in json.loads(blob).items() if k not in OF_A_RUN})
    if path.name == MANIFEST:
        manifest = json.loads(blob)
        files = {k: v for k, v in manifest.pop("files").items() if k not in TIMED}
        return {**{k: v for k, v in manifest.items() if k != "checksum"}, "files": files}
    if path.name == CARD:
        return [line for line in blob.decode().splitlines() if not any(told in line for told in _TOLD)]
    return blob
