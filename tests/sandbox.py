"""Where bubblewrap does not start, tests that run generated programs are skipped."""

import pytest

from freemoe.core.errors import SandboxError
from freemoe.evals.sandbox.bubblewrap import find_bwrap


def _error():
    try:
        find_bwrap()
    except SandboxError as error:
        return str(error).partition(". Install it")[0]
    return ""


needs_bubblewrap = pytest.mark.skipif(bool(_error()), reason=_error())
