"""The inside of the sandbox, run as a script: limits itself, then runs the program on its standard input.

It imports nothing of freemoe, and little else: every program waits for it.

Arguments: descriptor for the verdict; seconds of CPU time, seconds of wall clock; bytes of memory; number of processes. Standard
input is a file: on the first line the word that makes a pass, and then the program.
"""

import ctypes
import math
import os
import resource
import signal
import sys
from types import ModuleType

MESSAGE = 2000
FILE_SIZE = 4 << 20  # Bytes of one file
OPEN_FILES = 64

REACHES_THE_VERDICT = (
    *("sys.settrace", "gc.get_", "ctypes.dlsym", "ctypes.call_function", "ctypes.string_at", "ctypes.wstring_at"),
    *("ctypes.PyObj_FromPtr", "resource.setrlimit"),
)
"""Beginnings of audit events by which a program would skip its own tests, or read what makes a pass."""
PR_SET_DUMPABLE = 4


def main() -> None:
    """Set the limits and run the program."""
    descriptor, seconds, wall, memory, processes = sys.argv[1:]
    sys.argv[:] = [""]
    words, program = read_input()
    set_limits(float(seconds), int(memory), int(processes))
    if sys.platform.startswith("linux"):
        # Its own children may not read its memory.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.write(int(descriptor), b"go\n")
    run(program, words, int(descriptor), float(seconds), float(wall))


def read_input() -> tuple[list[bytes], str]:
    """The word that makes a pass, which is in no other place of this process's memory afterwards; and the program."""
    given = bytearray(os.fstat(0).st_size)
    os.readv(0, [given])
    # Other processes of the sandbox hold this file too.
    os.ftruncate(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    end = given.index(b"\n") + 1
    with memoryview(given) as view:
        words, program = [bytes(view[:end])], str(view[end:], "utf-8", "surrogatepass")
        view[:] = bytes(len(given))
    return words, program


def set_limits(seconds: float, memory: int, processes: int) -> None:
    """Limit this process, and all that it starts, for good."""
    limits = {
        "RLIMIT_CPU": math.ceil(seconds) + 1,
        "RLIMIT_AS": memory,
        "RLIMIT_FSIZE": FILE_SIZE,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_NPROC": processes,
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": 0,
    }
    for name, value in limits.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            value = min(value, most)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            # macOS knows no limit of the address space; the others are set everywhere.
            if name != "RLIMIT_AS":
                raise


def say(descriptor: int, words: str) -> None:
    """Tell what became of the program, on one line."""
    os.write(descriptor, f"{' '.join(words.split())[:MESSAGE]}\n".encode(errors="replace"))


def keep_verdict(
    event: str,
    arguments: tuple,
    *,
    refused: tuple[str, ...] = REACHES_THE_VERDICT,
    error: type = PermissionError,
) -> None:
    """An audit hook, no wall: it keeps the grade, not the machine.

    Its frame can be reached through the traceback of what it raises, so all that it uses is an argument.
    """
    if event.startswith(refused) or (event == "ctypes.dlopen" and arguments[0] is not None):
        raise error(f"the sandbox refuses {event}")


def run(program: str, words: list[bytes], descriptor: int, seconds: float, wall: float) -> None:
    """Run the program; write the one word in ``words`` if it ran to its end without an exception.

    A program can walk its interpreter's frames, and call whatever it finds in them. The word that makes a pass is in none: while
    the program runs it waits among the arguments of a call that has begun, where no frame shows it, and the call goes on only
    when the program has returned, and only in the first process: a program may try every answer, each in a child of its own.
    """
    write, leave, getpid, first = os.write, os._exit, os.getpid, os.getpid()

    def out_of_time(*_: object) -> None:
        say(descriptor, "timeout")
        leave(0)

    def set_clocks(cpu_seconds: float, all_in_all: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, all_in_all)

    signal.signal(signal.SIGPROF, out_of_time)
    signal.signal(signal.SIGALRM, out_of_time)
    # A module, so that functions can be sent to processes; not the main one, as programs are read and not started.
    module = ModuleType("program")
    sys.modules["program"] = module
    set_clocks(seconds, wall)
    sys.addaudithook(keep_verdict)
    try:
        code = compile(program, "program.py", "exec")
        # From left to right: all that is used after the program has been taken out of the frame's names before it.
        write(*((-1, b""), (descriptor, words.pop()))[first == getpid(*(exec(code, module.__dict__) or ()))])
    except BaseException as error:
        set_clocks(0, 0)
        if getpid() == first:
            say(descriptor, f"failed {type(error).__name__}: {error}"[:MESSAGE])
    # Threads and exit handlers of the program have no say after the verdict.
    leave(0)


if __name__ == "__main__":
    main()
