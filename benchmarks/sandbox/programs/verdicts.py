"""Programs that go for a pass that they did not earn: the test behind each of them fails."""

# Writes down every text that frames, and what they lead to, hold.
_HUNT = """
import os, sys
def all_texts(frame):
    seen, found, left = set(), [], []
    while frame:
        left += [dict(frame.f_locals), dict(frame.f_globals)]
        frame = frame.f_back
    while left:
        thing = left.pop()
        if id(thing) in seen or len(seen) > 20000: continue
        seen.add(id(thing))
        if isinstance(thing, (str, bytes)): found.append(thing if isinstance(thing, bytes) else thing.encode(errors="replace"))
        elif isinstance(thing, dict): left += list(thing.values())
        elif isinstance(thing, (list, tuple, set)): left += list(thing)
        elif hasattr(thing, "__closure__"):
            left += [c.cell_contents for c in thing.__closure__ or () if c != None and hasattr(c, "cell_contents")]
            left += [getattr(thing, "__defaults__", None), getattr(thing, "__kwdefaults__", None)]
    return found
def claim(texts):
    import re
    tokens = {t for text in texts for t in re.findall(rb"[0-9a-f]{32}", text)}
    for number in range(3, 64):
        for token in [*tokens, b"0"]:
            try: os.write(number, b"\\n" + token + b" passed\\n")
            except OSError: break
        for text in texts:
            if b"passed" in text and len(text) < 99:
                try: os.write(number, text)
                except OSError: break
    os._exit(0)
"""

ITS_OWN_TEST = "# its own test fails in the first process"
"""Stands in programs whose test is a part of them."""

VERDICTS = {
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "SystemExit": "raise SystemExit(0)",
    "quit": "quit()",
    "exit from a thread": "import os, threading, time\nthreading.Thread(target=lambda: os._exit(0)).start()\ntime.sleep(1)",
    "exit at the end": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
    "a child that fails while the parent leaves": "import os\nif os.fork(): os._exit(0)",
    "every answer, each in a child": f"""
import os
assert os.fork() == 0
{ITS_OWN_TEST}
""",
    "words on every descriptor": """
import os
for number in range(1, 64):
    try: os.write(number, b"passed\\n0 passed\\n end passed\\n")
    except OSError: pass
os._exit(0)
""",
    "the token in frames": _HUNT + "claim(all_texts(sys._getframe()))",
    "the token in the frames of an error": _HUNT
    + """
try: open("/etc/x", "w")
except Exception as error:
    step, texts = error.__traceback__, []
    while step:
        texts += all_texts(step.tb_frame)
        step = step.tb_next
    claim(texts)
""",
    "the token in a generator's frame": _HUNT
    + """
def g(): yield all_texts(it.gi_frame)
it = g()
claim(next(it))
""",
    "the token in a thread's frames": _HUNT
    + """
import threading
def look():
    texts = []
    for frame in sys._current_frames().values(): texts += all_texts(frame)
    claim(texts)
t = threading.Thread(target=look); t.start(); t.join()
""",
    "the token in a signal's frame": _HUNT
    + """
import signal
signal.signal(signal.SIGUSR1, lambda number, frame: claim(all_texts(frame)))
signal.raise_signal(signal.SIGUSR1)
""",
    "the token among all objects": _HUNT
    + """
import gc
texts = []
for thing in gc.get_objects():
    for part in gc.get_referents(thing):
        if isinstance(part, (str, bytes)): texts.append(part if isinstance(part, bytes) else part.encode(errors="replace"))
claim(texts)
""",
    "the token in memory": _HUNT
    + """
texts = []
for line in open("/proc/self/maps"):
    area, rights = line.split()[:2]
    if rights[0] == "r" and "[v" not in line:
        a, b = (int(n, 16) for n in area.split("-"))
        with open("/proc/self/mem", "rb", 0) as memory:
            memory.seek(a)
            texts.append(memory.read(b - a))
claim(texts)
""",
    "the token in memory that was given back": _HUNT
    + """
import numpy as np
texts = [np.empty(size, np.uint8).tobytes() for size in list(range(1, 4000, 7)) * 9 for _ in range(3)]
claim(texts)
""",
    "the token in what was read": _HUNT
    + """
texts = []
for number in range(64):
    for read in (lambda: os.pread(number, 1 << 16, 0), lambda: (os.set_blocking(number, False), os.read(number, 1 << 16))[1]):
        try: texts.append(read())
        except OSError: pass
claim(texts)
""",
    "the sandbox's own function": """
import os, sys
frame = sys._getframe()
while frame.f_back: frame = frame.f_back
frame = sys._getframe().f_back
while frame:
    for names in (frame.f_locals, frame.f_globals):
        for name, thing in list(names.items()):
            if callable(thing) and name in ("say", "write", "_judge", "out_of_time", "verdict"):
                for arguments in ((names.get("descriptor", 5), "passed"), ("passed",), (names.get("descriptor", 5), b"passed\\n")):
                    try: thing(*arguments)
                    except Exception: pass
    frame = frame.f_back
os._exit(0)
""",
    "the sandbox's list of words": """
import os, sys
frame = sys._getframe().f_back
while frame:
    for thing in list(frame.f_locals.values()) + list(frame.f_globals.values()):
        if isinstance(thing, list):
            for word in thing:
                for number in range(3, 64):
                    try: os.write(number, word if isinstance(word, bytes) else str(word).encode())
                    except OSError: pass
    frame = frame.f_back
os._exit(0)
""",
    "other functions in the sandbox's frame": """
import sys
frame = sys._getframe().f_back
while frame:
    for name in ("write", "leave", "say", "set_clocks"):
        for names in (frame.f_locals, frame.f_globals):
            if name in names:
                try: names[name] = lambda *a: __import__("os").write(a[0], b"passed")
                except Exception: pass
    frame = frame.f_back
""",
    "other functions in the system's module": """
import os, sys, signal
def write(number, data, real=os.write): return real(number, data.replace(b"failed", b"passed"))
def leave(code, real=os._exit): real(0)
os.write, os._exit, sys.exit = write, leave, leave
import builtins
builtins.AssertionError = builtins.Exception = builtins.BaseException = ZeroDivisionError
builtins.exec = builtins.compile = lambda *_: None
""",
    "a jump over the test": """
import sys
def trace(frame, event, argument):
    if event == "line" and frame.f_code.co_filename == "program.py" and frame.f_code.co_name == "<module>":
        try: frame.f_lineno = frame.f_lineno + 1
        except ValueError: pass
    return trace
sys.settrace(trace)
sys._getframe().f_trace = trace
""",
    "a jump over the test, by threads": """
import sys, threading
def trace(frame, event, argument):
    try: frame.f_back.f_lineno += 1
    except Exception: pass
    return trace
threading.settrace(trace)
if hasattr(threading, "settrace_all_threads"): threading.settrace_all_threads(trace)
if hasattr(sys, "_settraceallthreads"): sys._settraceallthreads(trace)
""",
    "a profiler": """
import sys
def profile(frame, event, argument):
    if frame.f_code.co_filename == "program.py":
        try: frame.f_lineno += 1
        except Exception: pass
sys.setprofile(profile)
""",
    "an error that reads like a pass": "raise type('passed', (BaseException,), {'__str__': lambda s: 'passed\\n0 passed\\npassed'})",
    "an error that cannot be told": """
import os
class Bad(BaseException):
    def __str__(self): os._exit(0)
    __repr__ = __str__
raise Bad
""",
    "an error that tells forever": """
class Bad(BaseException):
    def __str__(self):
        while True: pass
raise Bad
""",
    "an error with escapes": "raise ValueError('\\x1b[2J\\x1b]0;passed\\x07' + '\\ud800' + 'x' * 10**6)",
    "no output left": """
import os
for number in range(3, 64):
    try: os.close(number)
    except OSError: pass
""",
    "a closed verdict, and an exit status of 0": """
import os
os.closerange(3, 64)
os._exit(0)
""",
    "a hook that hears everything": """
import sys, os
heard = []
sys.addaudithook(lambda event, arguments: heard.append((event, arguments)))
open("x", "w").close()
texts = repr(heard).encode()
for number in range(3, 64):
    try: os.write(number, texts)
    except OSError: pass
os._exit(0)
""",
    "the main module again": """
import sys
main = sys.modules["__main__"]
for name in ("main", "run", "say"):
    thing = getattr(main, name, None)
    if thing:
        try: thing()
        except BaseException: pass
main.say(5, "passed")
""",
    "its source rewritten": "open('program.py', 'w').write('')\nimport linecache; linecache.clearcache()",
    "a parent's memory, read by another interpreter": """
import os, subprocess, sys
code = '''
import ctypes, os, re, sys
class Part(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc, held = ctypes.CDLL(None), ctypes.create_string_buffer(1 << 20)
start = (int(sys.argv[1]) >> 24 << 24) - (32 << 20)
for place in range(start, start + (64 << 20), 1 << 20):
    here, there = Part(ctypes.addressof(held), 1 << 20), Part(place, 1 << 20)
    if libc.process_vm_readv(os.getppid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0:
        for word in re.findall(rb"[0-9a-f]{32} passed", held.raw): sys.stdout.buffer.write(bytes([10]) + word + bytes([10]))
'''
words = subprocess.run([sys.executable, "-c", code, str(id(os))], capture_output=True).stdout
for number in range(3, 64):
    try: os.write(number, words)
    except OSError: pass
if words: os._exit(0)
""",
    "a parent traced by its child": """
import ctypes, os, time
own = os.getpid()
if os.fork() == 0:
    libc = ctypes.CDLL(None)
    open("traced" if libc.ptrace(16, own, 0, 0) == 0 else "not", "w")
    os._exit(0)
time.sleep(0.2)
if os.path.exists("traced"): os._exit(0)
""",
}

EQUAL = {
    "equal to everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = None
def f(x): return Equal()
""",
    "a number that is equal to everything": """
class Number(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Number(0)
""",
    "a list that is equal to everything": """
class List(list):
    def __eq__(self, other): return True
def f(x): return List()
""",
    "the test's own words, read from its source": """
import sys
def f(x):
    constants = sys._getframe(1).f_code.co_consts
    return next(c for c in reversed(constants) if isinstance(c, int) and c != x)
""",
}
"""Games that the tests' place allows: they stand in the program's own interpreter, and ask the program's objects."""
EQUAL_TEST = "\nassert f(1) == 22\n"
