"""Programs that go for files which are not theirs: to write, change, remove or read them."""

FILES = {
    "write a file": 'open(OUTSIDE + "/" + MARK, "w").write("x")',
    "append to a file": 'open(OUTSIDE + "/precious", "a").write("x")',
    "FileIO": 'import io\nio.FileIO(OUTSIDE + "/" + MARK, "w").write(b"x")',
    "os.open": "import os\nos.open(OUTSIDE + '/' + MARK, os.O_WRONLY | os.O_CREAT)",
    "dir_fd": """
import os
folder = os.open(OUTSIDE, os.O_RDONLY | os.O_DIRECTORY)
os.open(MARK, os.O_WRONLY | os.O_CREAT, dir_fd=folder)
""",
    "dir_fd of a folder above": """
import os
folder = os.open("/", os.O_PATH | os.O_DIRECTORY)
os.open(OUTSIDE[1:] + "/" + MARK, os.O_WRONLY | os.O_CREAT, dir_fd=folder)
""",
    "mkdir by dir_fd": """
import os
os.mkdir(MARK, dir_fd=os.open(OUTSIDE, os.O_PATH))
""",
    "change the directory first": "import os\nos.chdir(OUTSIDE)\nopen(MARK, 'w')",
    "sqlite3": """
import sqlite3
base = sqlite3.connect(OUTSIDE + "/" + MARK)
base.execute("create table t (x)")
base.commit()
""",
    "sqlite3, attached": """
import sqlite3
base = sqlite3.connect(":memory:")
base.execute("attach ? as there", (OUTSIDE + "/" + MARK,))
base.execute("create table there.t (x)")
base.commit()
""",
    "sqlite3, by address": """
import sqlite3
base = sqlite3.connect("file:" + OUTSIDE + "/" + MARK, uri=True)
base.execute("create table t (x)")
base.commit()
""",
    "dbm": 'import dbm.dumb\nwith dbm.dumb.open(OUTSIDE + "/" + MARK, "c") as base: base[b"x"] = b"y"',
    "mkfifo": 'import os\nos.mkfifo(OUTSIDE + "/" + MARK)',
    "mkfifo by dir_fd": "import os\nos.mkfifo(MARK, dir_fd=os.open(OUTSIDE, os.O_PATH))",
    "mknod": "import os, stat\nos.mknod(OUTSIDE + '/' + MARK, stat.S_IFREG | 0o600)",
    "symlink": 'import os\nos.symlink("/etc", OUTSIDE + "/" + MARK)',
    "symlink by dir_fd": 'import os\nos.symlink("/etc", MARK, dir_fd=os.open(OUTSIDE, os.O_PATH))',
    "through a symlink": 'import os\nos.symlink(OUTSIDE, "in")\nopen("in/" + MARK, "w")',
    "through a symlink that is swapped": """
import os, threading
open("mine", "w").close()
os.symlink("mine", "link")
def swap():
    while True:
        try:
            os.symlink(OUTSIDE + "/" + MARK, "other")
            os.replace("other", "link")
            os.symlink("mine", "other")
            os.replace("other", "link")
        except OSError:
            pass
threading.Thread(target=swap, daemon=True).start()
for _ in range(2000):
    try:
        open("link", "w").close()
    except OSError:
        pass
""",
    "hard link": """
import os
os.link(OUTSIDE + "/precious", "mine")
open("mine", "w").write("x")
""",
    "hard link by dir_fd": """
import os
os.link("precious", "mine", src_dir_fd=os.open(OUTSIDE, os.O_PATH))
open("mine", "w").write("x")
""",
    "rename outwards": 'import os\nopen("mine", "w").close()\nos.rename("mine", OUTSIDE + "/" + MARK)',
    "rename outwards by dir_fd": """
import os
open("mine", "w").close()
os.rename("mine", MARK, dst_dir_fd=os.open(OUTSIDE, os.O_PATH))
""",
    "rename inwards": 'import os\nos.rename(OUTSIDE + "/precious", "mine")',
    "truncate": 'import os\nos.truncate(OUTSIDE + "/precious", 0)',
    "remove": 'import os\nos.remove(OUTSIDE + "/precious")',
    "remove by dir_fd": 'import os\nos.remove("precious", dir_fd=os.open(OUTSIDE, os.O_PATH))',
    "remove a tree": "import shutil\nshutil.rmtree(OUTSIDE)",
    "chmod": 'import os\nos.chmod(OUTSIDE + "/precious", 0o777)',
    "chmod by dir_fd": 'import os\nos.chmod("precious", 0o777, dir_fd=os.open(OUTSIDE, os.O_PATH))',
    "chmod of an open file": 'import os\nos.fchmod(os.open(OUTSIDE + "/precious", os.O_RDONLY), 0o777)',
    "times": 'import os\nos.utime(OUTSIDE + "/precious", (1, 1))',
    "times by dir_fd": 'import os\nos.utime("precious", (1, 1), dir_fd=os.open(OUTSIDE, os.O_PATH))',
    "owner": 'import os\nos.chown(OUTSIDE + "/precious", 12345, 12345)',
    "attributes": 'import os\nos.setxattr(OUTSIDE + "/precious", "user.mark", b"x")',
    "shared memory": """
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None
shared_memory.SharedMemory(name=MARK, create=True, size=64)
""",
    "shared memory by its own call": "import os, _posixshmem\n_posixshmem.shm_open('/' + MARK, os.O_CREAT | os.O_RDWR, 0o600)",
    "a semaphore that stays": """
import _multiprocessing
_multiprocessing.SemLock(1, 1, 1, "/" + MARK, False)
""",
    "a file in shared memory": 'open("/dev/shm/" + MARK, "w")',
    "a file beside the packages": 'import sys\nopen(sys.prefix + "/" + MARK, "w")',
    "a file in the temporary folder": 'open("/tmp/" + MARK, "w")',
    "another program": """
from multiprocessing.util import spawnv_passfds
import time
spawnv_passfds(b"/bin/sh", ["sh", "-c", "touch " + OUTSIDE + "/" + MARK], ())
time.sleep(0.3)
""",
    "another interpreter, without the hook": """
import sys, time
from multiprocessing.util import spawnv_passfds
code = "open(%r, 'w')" % (OUTSIDE + "/" + MARK)
spawnv_passfds(sys.executable.encode(), [sys.executable, "-c", code], ())
time.sleep(0.4)
""",
    "the machine's own open": """
import ctypes
ctypes.CDLL(None).open((OUTSIDE + "/" + MARK).encode(), 0o101, 0o600)
""",
    "the machine's own open, found by hand": """
import _ctypes, ctypes
place = _ctypes.dlsym(_ctypes.dlopen(None, 0), "open")
ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)(place)(
    (OUTSIDE + "/" + MARK).encode(), 0o101, 0o600
)
""",
    "a hook without its helpers": """
import builtins, os
os.path.realpath = lambda path, **_: os.getcwd()
os.fsdecode = lambda path: os.getcwd()
os.lstat = os.readlink = lambda *_, **__: None
builtins.isinstance = lambda *_: False
open(OUTSIDE + "/" + MARK, "w")
""",
    "a hook opened by its own error": """
try:
    open(OUTSIDE + "/" + MARK, "w")
except OSError as error:
    step = error.__traceback__
    while step:
        frame = step.tb_frame
        for names in (frame.f_globals, frame.f_locals):
            for name in list(names):
                if name not in ("MARK", "OUTSIDE", "error", "step", "frame", "names", "name", "__builtins__", "open"):
                    try:
                        names[name] = "" if isinstance(names[name], str) else ()
                    except Exception:
                        pass
        step = step.tb_next
open(OUTSIDE + "/" + MARK, "w")
""",
    "another copy of the system's module": """
import importlib, os, sys
del sys.modules["posix"]
copy = importlib.import_module("posix")
copy.mkfifo(OUTSIDE + "/" + MARK)
""",
    "another root": """
import os
os.mkdir("deep")
os.chroot("deep")
for _ in range(64):
    os.chdir("..")
os.chroot(".")
open(OUTSIDE + "/" + MARK, "w")
""",
    "at the end": 'import atexit\natexit.register(lambda: open(OUTSIDE + "/" + MARK, "w"))\nraise SystemExit',
    "from a thread that goes on": """
import threading, time
def later():
    time.sleep(0.1)
    open(OUTSIDE + "/" + MARK, "w")
threading.Thread(target=later).start()
""",
    "read a secret": 'raise ValueError(open(OUTSIDE + "/secret").read())',
    "read a secret through a link": 'import os\nos.symlink(OUTSIDE + "/secret", "s")\nraise ValueError(open("s").read())',
    "the environment": "import os\nraise ValueError(dict(os.environ))",
    "the parent's environment": "import os\nraise ValueError(open(f'/proc/{os.getppid()}/environ').read())",
    "another's environment": "raise ValueError(open(f'/proc/{VICTIM}/environ').read())",
    "another's open files": "import os\nraise ValueError(open(f'/proc/{VICTIM}/root' + OUTSIDE + '/secret').read())",
    "files that were left open": """
import os
found = b""
for number in range(3, 200):
    try:
        found += os.pread(number, 4096, 0)
    except OSError:
        pass
raise ValueError(found)
""",
}
