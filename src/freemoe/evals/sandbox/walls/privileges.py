"""No privilege that this process has, or could win by running another program; and no look into its memory from beside it."""

from __future__ import annotations

import ctypes

from freemoe.evals.sandbox.walls.kernel import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, Refused, call, prctl

PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
VERSION_3 = 0x20080522


def give_up() -> None:
    """``no_new_privs``, every capability dropped, not dumpable; for good.

    Raises:
        Refused: The kernel knows no ``no_new_privs``.
    """
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except Refused:
            break  # one more than the kernel has, or none of them ours to drop
    try:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    except Refused:
        pass
    header = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    call("capset", ctypes.byref(header), ctypes.byref(nothing))
    prctl(PR_SET_DUMPABLE, 0)
