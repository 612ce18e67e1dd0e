"""Programs that go for other processes, for the network, and for more than their share."""

PROCESSES = {
    "kill": "import os\nos.kill(VICTIM, 9)",
    "kill the parent": "import os\nif os.getppid() > 1: os.kill(os.getppid(), 9)",
    "stop": "import os, signal\nos.kill(VICTIM, signal.SIGSTOP)",
    "stop the parent": "import os, signal\nif os.getppid() > 1: os.kill(os.getppid(), signal.SIGSTOP)",
    "kill a group": "import os\nos.killpg(VICTIM, 9)",
    "kill by pidfd": "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(VICTIM), 9)",
    "kill by another program": """
import time
from multiprocessing.util import spawnv_passfds
spawnv_passfds(b"/bin/sh", ["sh", "-c", f"kill -9 {VICTIM}"], ())
time.sleep(0.3)
""",
    "kill by the C library": "import ctypes\nctypes.CDLL(None).kill(VICTIM, 9)",
    "signal by a descriptor": """
import fcntl, os, socket
ours, theirs = socket.socketpair()
fcntl.fcntl(ours, 10, 9)
fcntl.fcntl(ours, fcntl.F_SETOWN, VICTIM)
fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
theirs.send(b"x")
""",
    "lower limits": "import resource\nresource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (3, 3))",
    "lower the parent's limits": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))",
    "take turns away": "import os\nos.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "take the parent's turns away": "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "take cores away": "import os\nos.sched_setaffinity(VICTIM, {min(os.sched_getaffinity(0))})",
    "take turns away by the scheduler": "import os\nos.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0))",
    "look into another's memory": "open(f'/proc/{VICTIM}/mem', 'rb')\nopen(OUTSIDE + '/' + MARK, 'w')",
    "trace": "import ctypes\nctypes.CDLL(None).ptrace(16, VICTIM, 0, 0)",
    "first to be ended": "open(f'/proc/{VICTIM}/oom_score_adj', 'w').write('1000')",
    "a daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(2)
        open(OUTSIDE + "/" + MARK, "w")
        os._exit(0)
    os._exit(0)
""",
    "a daemon of another program": """
from multiprocessing.util import spawnv_passfds
spawnv_passfds(b"/bin/sh", ["sh", "-c", f"setsid sh -c 'sleep 2; touch {OUTSIDE}/{MARK}' &"], ())
""",
    "new namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\nopen(OUTSIDE + '/' + MARK, 'w')",
    "a mount": """
import os, time
from multiprocessing.util import spawnv_passfds
spawnv_passfds(b"/bin/sh", ["sh", "-c", f"unshare -rm mount -t tmpfs none {OUTSIDE}; mount -t tmpfs none {OUTSIDE}"], ())
time.sleep(0.3)
""",
}

NETWORK = {
    "TCP": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "TCP, without the module": "import _socket\ns = _socket.socket(2, 1, 0)\ns.connect(('127.0.0.1', PORT))",
    "UDP": "import socket\nsocket.socket(2, 2).sendto(b'x', ('127.0.0.1', PORT))",
    "HTTP": "import urllib.request\nurllib.request.urlopen(f'http://127.0.0.1:{PORT}', timeout=1)",
    "asyncio": "import asyncio\nasyncio.run(asyncio.open_connection('127.0.0.1', PORT))",
    "a socket with a path": "import socket\nsocket.socket(socket.AF_UNIX).connect(OUTSIDE + '/socket')",
    "a socket with a name": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0' + MARK + 'socket')",
    "datagrams of a pair to a path": """
import socket
ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
ours.sendto(b"x", OUTSIDE + "/datagrams")
""",
    "datagrams of a pair to a name": """
import socket
ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
ours.sendto(b"x", b"\\0" + MARK.encode() + b"datagrams")
""",
    "multiprocessing's client": "from multiprocessing.connection import Client\nClient(OUTSIDE + '/socket')",
    "the C library's socket": """
import ctypes, struct
libc = ctypes.CDLL(None)
libc.connect(libc.socket(2, 1, 0), struct.pack("<HHIQ", 2, int.from_bytes(PORT.to_bytes(2, "big"), "little"), 0x0100007F, 0), 16)
""",
    "another program's socket": """
import time
from multiprocessing.util import spawnv_passfds
spawnv_passfds(b"/bin/bash", ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{PORT}"], ())
time.sleep(0.3)
""",
}

EXCESS = {
    "memory": "x = []\nwhile True: x.append(bytearray(10**7))",
    "memory at once": "x = bytearray(10**12)",
    "memory of many processes": """
import os, time
for _ in range(12):
    if os.fork() == 0:
        x = bytearray(b"x") * (400 << 20)
        time.sleep(9)
time.sleep(9)
""",
    "memory shared by many processes": """
import mmap, os, time
for _ in range(6):
    if os.fork() == 0:
        area = mmap.mmap(-1, 900 << 20)
        for place in range(0, len(area), 4096): area[place] = 1
        time.sleep(9)
time.sleep(9)
""",
    "shared memory that no process shows": """
import mmap, os, time
for _ in range(6):
    if os.fork() == 0:
        area = mmap.mmap(-1, 900 << 20)
        for start in range(0, len(area), 32 << 20):
            for place in range(start, min(start + (32 << 20), len(area)), 4096): area[place] = 1
            area.madvise(mmap.MADV_DONTNEED)
        time.sleep(9)
time.sleep(9)
""",
    "memory of the machine, by another interpreter": """
import subprocess, sys
code = '''
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(6):
    area = libc.shmat(libc.shmget(0, 900 << 20, 0o1600), None, 0)
    if area not in (None, 2**64 - 1):
        ctypes.memset(area, 1, 900 << 20)
        libc.shmdt(ctypes.c_void_p(area))
'''
subprocess.run([sys.executable, "-c", code])
""",
    "memory without a name": """
import os
held = [os.memfd_create("x") for _ in range(50)]
for number in held:
    os.write(number, bytes(4 << 20))
raise ValueError(f"held {len(held)}")
""",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "a thread bomb": """
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(9,)).start()
    except RuntimeError: time.sleep(0.01)
""",
    "a large file": "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "many large files": """
for n in range(200):
    try: open(f"x{n}", "wb").write(bytes(3 << 20))
    except OSError as error: last = error
import time; time.sleep(9)
""",
    "many small files": "for n in range(10**6): open(f'x{n}', 'w').close()",
    "folders without end": "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')",
    "deleted files that stay open": """
import os, time
held = []
for n in range(50):
    held.append(open("x", "wb"))
    held[-1].write(bytes(3 << 20)); held[-1].flush(); os.remove("x")
time.sleep(1)
""",
    "shared memory": "f = open('/dev/shm/x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "open files": "held = []\nwhile True: held.append(open('/dev/null'))",
    "words without end": "import sys\nwhile True: print('x' * 10**6)",
    "a flooded verdict": """
import os
for number in range(3, 60):
    try:
        os.set_blocking(number, False)
        while True: os.write(number, b'x' * 4096)
    except OSError: pass
""",
    "time": "while True: pass",
    "sleep": "import time\ntime.sleep(99)",
    "deaf to signals": """
import signal
for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGTERM, signal.SIGXCPU):
    signal.signal(number, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 0)
signal.setitimer(signal.ITIMER_PROF, 0)
while True: pass
""",
    "a number without end": "10 ** 10 ** 9",
    "a pattern without end": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "stopped by itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nimport time; time.sleep(9)",
    "a crash": "import ctypes\nctypes.cast(1, ctypes.POINTER(ctypes.c_int))[0]",
}
