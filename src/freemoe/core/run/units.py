"""Units of work, and how a process does one for another.

A unit is a name, the path of a function and plain arguments, so that it means the same wherever it is done: here, in other
processes (`processes`), or on other machines (`freemoe.distributed`).
"""

from __future__ import annotations

import pickle
import pkgutil
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freemoe.core.errors import FreeMoEError


@dataclass(frozen=True)
class Unit:
    """A unit of work, named so that any process can do it."""

    name: str  # What errors call it; no two units of one run share it
    function: str  # ``package.module:function``, at the top of its module
    arguments: Mapping[str, Any]  # Its keyword arguments: what JSON can say. What it returns can be pickled.

    def work(self) -> Any:
        """Do it here and now."""
        return pkgutil.resolve_name(self.function)(**self.arguments)


def run_pickled(unit: Unit, where: str) -> bytes:
    """Do a unit for another process: a pickled pair, whether it went well, and the result or the error."""
    try:
        # Pickled here and not by what carries it: torch would hand tensors over as files that end with this process.
        return pickle.dumps((True, unit.work()))
    except Exception as error:
        error.add_note(f"in {where}, in {unit.name!r}:\n{traceback.format_exc()}")
        try:
            pickle.loads(blob := pickle.dumps((False, error)))
        except Exception:  # of a class that cannot be pickled
            blob = pickle.dumps((False, FreeMoEError(f"{unit.name!r}: {type(error).__name__}: {error}")))
        return blob
