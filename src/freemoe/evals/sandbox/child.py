"""The inside of the sandbox: limits this very process, then runs the program it is given. Never imported.

Arguments: descriptor for the verdict, seconds of CPU time, seconds of wall clock, bytes of memory, whether to
ask for namespaces. Standard input: a token on the first line, which marks true verdicts, and then the program.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from types import CodeType

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
FILE_SIZE = 4 << 20
OPEN_FILES = 64
PROCESSES = 64
MESSAGE = 2000

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NEVER = tuple(
    """
    socket. subprocess. pty. os.fork os.exec os.posix_spawn os.spawn os.system os.startfile os.kill
    signal.pthread_kill syslog. webbrowser. ftplib. smtplib. http.client. urllib. resource.setrlimit
    resource.prlimit
    """.split()  # noqa: SIM905
)
CHANGES = tuple(
    """
    os.remove os.rename os.rmdir os.mkdir os.link os.symlink os.chmod os.chown os.chflags os.truncate
    os.utime os.setxattr os.removexattr shutil.rmtree shutil.move shutil.chown
    """.split()  # noqa: SIM905
)


def own_namespaces() -> bool:
    """Leave the network, and the sight of other processes, where the kernel lets an ordinary user do that."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC) == 0


def set_limits(seconds: float, memory: int) -> None:
    """Limit CPU time, address space, file size, open files, processes and core files, for good."""
    cpu = math.ceil(seconds) + 1
    wanted = [
        ("RLIMIT_CPU", cpu, cpu),
        ("RLIMIT_AS", memory, memory),
        ("RLIMIT_FSIZE", FILE_SIZE, FILE_SIZE),
        ("RLIMIT_NOFILE", OPEN_FILES, OPEN_FILES),
        ("RLIMIT_NPROC", PROCESSES, PROCESSES),
        ("RLIMIT_CORE", 0, 0),
    ]
    for name, soft, hard in wanted:
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        try:
            resource.setrlimit(kind, (soft, hard))
        except (ValueError, OSError):
            # macOS knows no limit of the address space; the others are set everywhere.
            if name != "RLIMIT_AS":
                raise


def fence(folder: str):
    """Make the audit hook: refuse what a tested function has no business with."""
    root = os.path.realpath(folder)
    inside, beneath = root, root + os.sep
    # Taken now, so that a program that rebinds them changes nothing here.
    real, fspath, kinds = os.path.realpath, os.fsdecode, (str, bytes)

    def private(path: object) -> bool:
        if not isinstance(path, kinds):
            return True  # a descriptor that is open already, or no path at all
        full = real(fspath(path))
        return full == inside or full.startswith(beneath) or full == "/dev/null"

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(NEVER):
            raise PermissionError(f"the sandbox refuses {event}")
        if event == "ctypes.dlopen" and arguments and arguments[0] is not None:
            raise PermissionError("the sandbox refuses native libraries")
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
            if not private(arguments[0]):
                raise PermissionError("the sandbox refuses to write outside its directory")
        elif event in CHANGES and not all(private(a) for a in arguments[:2]):
            raise PermissionError(f"the sandbox refuses {event} outside its directory")

    return hook


def verdict(program: str, descriptor: int, token: str, seconds: float, wall: float) -> None:
    """Run the program and write what became of it, marked by the token."""
    write, leave = os.write, os._exit

    def say(word: str) -> None:
        line = " ".join(f"{token} end {word}".split())[:MESSAGE]
        write(descriptor, f"{line}\n".encode(errors="replace"))

    def out_of_time(*_: object) -> None:
        say("timeout")
        leave(0)

    def set_clocks(own: float, all_in_all: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, own)
        signal.setitimer(signal.ITIMER_REAL, all_in_all)

    signal.signal(signal.SIGPROF, out_of_time)
    signal.signal(signal.SIGALRM, out_of_time)
    set_clocks(seconds, wall)
    sys.addaudithook(fence(os.curdir))
    try:
        code: CodeType = compile(program, "program.py", "exec")
        exec(code, {})
    except BaseException as error:
        set_clocks(0, 0)
        say(f"failed {type(error).__name__}: {error}"[:MESSAGE])
    else:
        set_clocks(0, 0)
        say("passed")
    # Threads and exit handlers of the program have no say after the verdict.
    leave(0)


def main() -> None:
    """Limit this process and run the program from standard input."""
    descriptor, seconds = int(sys.argv[1]), float(sys.argv[2])
    wall, memory, namespaces = float(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "1"
    token, _, program = sys.stdin.buffer.read().decode("utf-8", "surrogatepass").partition("\n")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.argv[:] = [""]
    isolated = namespaces and own_namespaces()
    if isolated:
        os.write(descriptor, f"{token} isolated\n".encode())
        # The first process of a new process namespace takes all others with it when it ends.
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
    set_limits(seconds, memory)
    verdict(program, descriptor, token, seconds, wall)


if __name__ == "__main__":
    main()
