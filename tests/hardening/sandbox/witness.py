"""What programs must leave as it is: a folder, a process, sockets, places where marks are left; looked at before and after."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from freemoe.core.errors import SandboxError
from freemoe.evals.sandbox.runner import run_tests
from tests.hardening.worker import Worker

PLACES = ("/dev/shm", "/tmp", sys.prefix)
"""Folders in which marks are looked for."""
SLACK = 15.0
"""Seconds beyond a program's own that an answer may take; a parent that is slower hangs."""

_IDLE = "import os, time\nparent = os.getppid()\nwhile os.getppid() == parent: time.sleep(1)"


def start():
    """What a parent does with a program."""

    def run(asked):
        try:
            result = run_tests(**asked)
        except SandboxError as error:
            return {"passed": False, "detail": str(error)}
        return {"passed": result.passed, "detail": result.detail}

    run({"program": "pass", "isolation": "none"})
    return run


class Parent(Worker):
    """The process that has programs run: it may be harmed, so not the test's own."""

    def run(self, program, isolation, timeout, memory):
        """What became of a program; None where this process did not live to say so, or hangs."""
        asked = {"program": program, "isolation": isolation, "timeout": timeout, "memory": memory}
        try:
            return self.ask(asked, 3 * timeout + SLACK)
        except (EOFError, TimeoutError):
            return None


class Witness:
    """The scene of a program, and what has changed in it."""

    def __init__(self):
        self.mark = f"freemoe-mark-{secrets.token_hex(4)}"
        self.secret = f"secret-{secrets.token_hex(12)}"
        self.folder = Path(tempfile.mkdtemp(prefix="freemoe-outside-"))
        self.temporary = Path(tempfile.mkdtemp(prefix="freemoe-parent-"))
        self.sockets: list[socket.socket] = []
        self._victim: subprocess.Popen | None = None
        self._parent: Parent | None = None
        self._lay_out()
        self._listen()

    # ------------------------------------------------------------------ the scene

    def _lay_out(self):
        self.folder.mkdir(0o700, exist_ok=True)
        for path in self.folder.iterdir():
            if not path.is_socket():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (self.folder / "precious").write_text("precious")
        (self.folder / "secret").write_text(self.secret)
        for path in ("precious", "secret"):
            (self.folder / path).chmod(0o600)

    def _listen(self):
        for one in self.sockets:
            one.close()
        tcp, udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        tcp.bind(("127.0.0.1", 0))
        self.port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", self.port))
        self.sockets = [tcp, udp]
        kinds = {"socket": socket.SOCK_STREAM, "datagrams": socket.SOCK_DGRAM}
        addresses = [(str(self.folder / name), kind) for name, kind in kinds.items()]
        for address, kind in [*addresses, *((f"\0{self.mark}{name}", kind) for name, kind in kinds.items())]:
            listener = socket.socket(socket.AF_UNIX, kind)
            try:
                listener.bind(address)
            except OSError:
                listener.close()
                continue
            self.sockets.append(listener)
        for one in self.sockets:
            if one.type == socket.SOCK_STREAM:
                one.listen()
            one.setblocking(False)

    @property
    def victim(self):
        """A process that does nothing, started anew where it has ended."""
        if self._victim is None or self._victim.poll() is not None:
            self._victim = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _IDLE], env={"FREEMOE_SECRET": self.secret}, start_new_session=True
            )
        return self._victim

    @property
    def parent(self):
        """The process that has programs run, started anew where it has ended."""
        if self._parent is None or self._parent.process.poll() is not None:
            if self._parent:
                self._parent.close()
            environment = {"FREEMOE_SECRET": self.secret, "TMPDIR": str(self.temporary)}
            self._parent = Parent(__name__, environment=environment)
        return self._parent

    def before(self, program):
        """The program with the names of what it goes for."""
        names = {"OUTSIDE": str(self.folder), "VICTIM": self.victim.pid, "PORT": self.port, "MARK": self.mark}
        return "\n".join(f"{name} = {value!r}" for name, value in names.items()) + "\n" + program

    # ------------------------------------------------------------------ what is seen

    def outside(self):
        """Everything outside the sandbox that a program could have changed, one line a thing."""
        left = (f"left behind: {path.name}" for path in self.temporary.iterdir())
        return {*self._files(), *self._marks(), *self._visits(), *left}

    def _files(self):
        if os.path.ismount(self.folder):
            yield "a mount"
            subprocess.run(["umount", "-l", str(self.folder)], check=False)
        for path in [self.folder, *sorted(self.folder.rglob("*"))] if self.folder.exists() else []:
            about = path.lstat()
            told = f"{path.name} {about.st_mode:o} {about.st_uid}"
            if path.is_file() and not path.is_symlink():
                told += f" {about.st_nlink} {about.st_mtime_ns} {path.read_bytes()!r}"
                with contextlib.suppress(OSError):
                    told += f" {os.listxattr(path)}"
            yield told

    def _marks(self):
        for place in PLACES:
            with contextlib.suppress(OSError):
                yield from (str(path) for path in Path(place).iterdir() if self.mark in path.name)

    def _visits(self):
        for number, listener in enumerate(self.sockets):
            with contextlib.suppress(BlockingIOError):
                if listener.type == socket.SOCK_DGRAM:
                    listener.recv(16)
                else:
                    listener.accept()[0].close()
                yield f"somebody came to socket {number}"

    def health(self):
        """Of the victim and of the parent: whether they live, and by which rules."""
        watched = {"victim": self._victim, "parent": self._parent and self._parent.process}
        return {name: _health(p.pid) if p and p.poll() is None else "ended" for name, p in watched.items()}

    def mend(self):
        """Make everything as it was, for the next program."""
        for path in self._marks():
            Path(path).unlink()
        self._lay_out()
        if not all((self.folder / name).is_socket() for name in ("socket", "datagrams")):
            self._listen()
        for process in (self._victim, self._parent and self._parent.process):
            if process and process.poll() is None:
                process.kill()
                process.wait()

    def close(self):
        """End everything and leave nothing."""
        self.mend()
        if self._parent:
            self._parent.close()
        for one in self.sockets:
            one.close()
        for folder in (self.folder, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)


def _health(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        limits = Path(f"/proc/{process}/limits").read_text()
        first = Path(f"/proc/{process}/oom_score_adj").read_text().strip()
        places = sorted(os.sched_getaffinity(process))
        turns = os.getpriority(os.PRIO_PROCESS, process), os.sched_getscheduler(process)
    except (OSError, AttributeError):
        return "lives"  # a machine that does not say more
    return f"{'stopped' if state in 'Tt' else 'lives'} {places} {turns} {first} {limits}"
