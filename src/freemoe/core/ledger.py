"""The ledger of test documents: how often this user opened them.

Whoever builds ten times and keeps the best has chosen by the test documents, though no single build did. One small file per
opening, in the user's state folder, named after what was opened and by what: any number of processes may add theirs, and the
same run twice is one opening. It holds a hash of 8 bytes per document and no text.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from freemoe.core.files import TEMPORARY, json_digest

VARIABLE = "FREEMOE_LEDGER"
"""Names another folder for the ledger; `OFF` keeps none."""
OFF = "off"


def ledger_folder() -> Path | None:
    """Where openings are kept: ``FREEMOE_LEDGER``, or below the user's state folder; None where it is switched off."""
    named = os.environ.get(VARIABLE)
    if named == OFF:
        return None
    folder = Path(named) if named else Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "freemoe" / "ledger"
    return folder.expanduser()


def keep_none() -> None:
    """Keep no ledger in this process and its children unless one is named: a demo or benchmark proves nothing of the user's."""
    os.environ.setdefault(VARIABLE, OFF)


def count_openings(contents: Iterable[str], opening: object) -> int | None:
    """Note that test documents were opened, and count how often they were.

    Case and white space of the contents do not matter; the same ``opening`` again is not counted again.

    Returns:
        Openings so far, this one among them, of the document that was opened most often; None where no ledger can be kept,
        which stops nothing.
    """
    own = {
        hashlib.blake2b(" ".join(text.lower().split()).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        for text in contents
    }
    try:
        folder = ledger_folder()
        if folder is None or not own:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / json_digest([opening, sorted(own)])
        if not path.exists():
            temporary = folder / f"{path.name}.{os.getpid()}{TEMPORARY}"
            temporary.write_text("\n".join(sorted(own)), encoding="ascii")
            temporary.replace(path)
        seen: Counter[str] = Counter()
        for other in folder.iterdir():
            if other.suffix != TEMPORARY and other.is_file():
                seen.update(own.intersection(other.read_text(encoding="ascii", errors="replace").split()))
        return max(seen.values())
    except (OSError, RuntimeError, ValueError):  # no room, no right, no home
        return None


def openings_text(count: int | None) -> list[str]:
    """A line for people from the second opening on, else none."""
    if count is None or count < 2:
        return []
    ending = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return [
        f"These test documents were opened for the {count}{ending} time: the best of several looks is better than it will be "
        "on new documents. Settle on new test documents what is settled."
    ]
