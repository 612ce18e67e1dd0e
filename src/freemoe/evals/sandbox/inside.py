"""The inside of the sandbox: raises walls around this very process, then runs the program that it is given.

Arguments: the folder that freemoe stands in; descriptor for the verdict; seconds of CPU time, seconds of wall clock; bytes of
memory; the walls that are asked for; whether to go on without any. Standard input, a file: on the first line the word that makes
a pass, and then the program. What is written up to the line ``go`` is ours; after it the program may write too.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType

from freemoe.evals.sandbox.walls import KEEP_FILES, landlock, namespaces, privileges, seccomp
from freemoe.evals.sandbox.walls.fence import fence, take_away
from freemoe.evals.sandbox.walls.kernel import LINUX, PR_SET_PDEATHSIG, Refused, prctl
from freemoe.evals.sandbox.walls.limits import set_limits
from freemoe.evals.sandbox.walls.reads import DEVICES, readable

MESSAGE = 2000


def main() -> None:
    """Raise the walls and run the program from standard input."""
    descriptor, seconds, wall, memory, asked, unsafe = sys.argv[2:8]
    words, program = read_in()
    sys.argv[:] = [""]
    if LINUX:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _first_to_go()
    standing, absent = raise_walls(asked.split(","), float(seconds), int(memory))
    refused = unsafe != "1" and not set(standing) & set(KEEP_FILES)
    lines = [
        f"walls {','.join(standing)}",
        *(f"absent {name}: {why}" for name, why in absent),
        "refused" if refused else "go",
    ]
    os.write(int(descriptor), "".join(f"{' '.join(line.split())}\n" for line in lines).encode())
    if refused:
        os._exit(0)
    take_away(own_processes(standing))
    run(program, words, int(descriptor), float(seconds), float(wall), standing)


def read_in() -> tuple[list[bytes], str]:
    """The word that makes a pass, which is in no other place of this process's memory afterwards; and the program."""
    given = bytearray(os.fstat(0).st_size)
    os.readv(0, [given])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    end = given.index(b"\n") + 1
    with memoryview(given) as view:
        words, program = [bytes(view[:end])], str(view[end:], "utf-8", "surrogatepass")
        view[:] = bytes(len(given))
    return words, program


def own_processes(standing: list[str]) -> bool:
    """Whether the program sees its own processes and files only."""
    return "namespaces" in standing or "bubblewrap" in standing


def raise_walls(asked: list[str], seconds: float, memory: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Raise those that the kernel gives; return what stands, and why the others do not.

    Where there are namespaces, the caller goes on as the first process of them: its parent waits here, and ends as it ends.
    """
    folder = os.getcwd()
    read = readable(sys.path)
    standing, absent = [], []
    if "bubblewrap" in asked:
        standing.append("bubblewrap")
    if "namespaces" in asked:
        try:
            namespaces.leave()
            namespaces.own_tree(folder, read)
            standing.append("namespaces")
        except Refused as error:
            absent.append(("namespaces", str(error)))
        else:
            _go_on_inside()
    alone = own_processes(standing)
    set_limits(seconds, memory, alone)
    steps: dict[str, Callable[[], None]] = {
        "privileges": privileges.give_up,
        "landlock": lambda: landlock.confine([folder, *(["/dev/shm"] if alone else [])], read, DEVICES),
        "seccomp": lambda: seccomp.filter_calls(alone, alone),
    }
    for name, step in steps.items():
        if name not in asked and name != "privileges":
            continue
        try:
            step()
            standing.append(name)
        except Refused as error:
            absent.append((name, str(error)))
    return standing, absent


def _go_on_inside() -> None:
    """Go on as the first process of the new namespaces, which takes all others with it when it ends."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _first_to_go() -> None:
    """Where memory runs out, the kernel ends this process before any other."""
    if LINUX:
        try:
            with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
                file.write("1000")
        except OSError:
            pass


def say(descriptor: int, words: str) -> None:
    """Tell what became of the program, on one line."""
    os.write(descriptor, f"{' '.join(words.split())[:MESSAGE]}\n".encode(errors="replace"))


def run(program: str, words: list[bytes], descriptor: int, seconds: float, wall: float, standing: list[str]) -> None:
    """Run the program; write the one word in ``words`` if it ran to its end without an exception.

    A program can walk its interpreter's frames, and call whatever it finds in them. The word that makes a pass is in none: while
    the program runs it waits among the arguments of a call that has begun, where no frame shows it, and the call goes on only
    when the program has returned, and only in the first process: a program may try every answer, each in a child of its own.
    """
    write, leave, getpid, first = os.write, os._exit, os.getpid, os.getpid()

    def out_of_time(*_: object) -> None:
        say(descriptor, "timeout")
        leave(0)

    def set_clocks(own: float, all_in_all: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, own)
        signal.setitimer(signal.ITIMER_REAL, all_in_all)

    signal.signal(signal.SIGPROF, out_of_time)
    signal.signal(signal.SIGALRM, out_of_time)
    # A module, so that functions can be sent to processes; not the main one, as programs are read and not started.
    module = ModuleType("program")
    for name in [name for name in sys.modules if name.split(".")[0] == "freemoe"]:
        del sys.modules[name]
    sys.modules["program"] = module
    own = own_processes(standing)
    set_clocks(seconds, wall)
    for hook in fence(os.curdir, own, own):
        sys.addaudithook(hook)
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
