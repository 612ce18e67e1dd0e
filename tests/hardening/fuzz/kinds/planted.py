"""A kind of cases that do what they are told, to see that each way to end is noticed."""

import contextlib
import ctypes
import signal
import sys
import time
from pathlib import Path

from freemoe.core.errors import DataError
from tests.hardening.fuzz.case import WrongError


def attempt(what, material, folder):
    match what:
        case "refuse":
            raise DataError("no")
        case "exit":
            sys.exit(3)
        case "wrong":
            raise WrongError("it is not what it says")
        case "raise":
            raise KeyError("nobody expected this")
        case "sleep":
            time.sleep(30)
        case "swallow":
            while True:
                with contextlib.suppress(Exception):
                    time.sleep(30)
        case "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            time.sleep(60)
        case "die":
            ctypes.string_at(0)
        case "swell":
            bytearray(1 << 40)
        case "write":
            (Path.cwd() / "left.txt").write_text(str(folder))
