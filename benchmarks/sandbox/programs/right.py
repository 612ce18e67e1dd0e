"""Programs that are right, and must pass."""

RIGHT = {
    "asyncio": """
import asyncio
async def double(x):
    await asyncio.sleep(0.001)
    return 2 * x
async def main(): return await asyncio.gather(*(double(x) for x in range(20)))
assert asyncio.run(main()) == [2 * x for x in range(20)]
""",
    "asyncio with threads and time limits": """
import asyncio, time
async def main():
    slow = asyncio.to_thread(time.sleep, 0.01)
    await asyncio.wait_for(slow, 5)
    queue = asyncio.Queue()
    for x in range(3): await queue.put(x)
    try: await asyncio.wait_for(asyncio.Event().wait(), 0.01)
    except asyncio.TimeoutError: return [await queue.get() for _ in range(3)]
assert asyncio.run(main()) == [0, 1, 2]
""",
    "threads": """
import threading
total, lock = 0, threading.Lock()
def add():
    global total
    for _ in range(1000):
        with lock: total += 1
threads = [threading.Thread(target=add) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert total == 8000
""",
    "a pool of threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool: assert sum(pool.map(abs, range(-100, 0))) == 5050
""",
    "decimal and fractions": """
from decimal import Decimal, getcontext
from fractions import Fraction
getcontext().prec = 60
assert str(Decimal(2).sqrt()).startswith("1.41421356237309504880168872420969807856967187537694")
assert sum(Fraction(1, n) for n in range(1, 5)) == Fraction(25, 12)
""",
    "patterns": "import re\nassert re.sub(r'(\\w+) (\\w+)', r'\\2 \\1', 'one two') == 'two one'",
    "recursion": """
import sys
sys.setrecursionlimit(9000)
def f(n): return 0 if n == 0 else 1 + f(n - 1)
assert f(8000) == 8000
""",
    "much memory": "x = bytearray(700 << 20)\nassert len(x) == 700 << 20",
    "numpy": """
import numpy as np
a = np.arange(9.0).reshape(3, 3) + np.eye(3)
assert np.allclose(a @ np.linalg.inv(a), np.eye(3))
""",
    "a temporary file": """
import tempfile, os
with tempfile.NamedTemporaryFile("w+") as f:
    f.write("hello"); f.seek(0)
    assert f.read() == "hello"
with tempfile.TemporaryDirectory() as folder:
    open(os.path.join(folder, "x"), "w").close()
    assert os.listdir(folder) == ["x"]
assert not os.path.exists(folder)
""",
    "files and folders": """
import pathlib, shutil
here = pathlib.Path("a/b"); here.mkdir(parents=True)
(here / "x.txt").write_text("one"); (here / "x.txt").touch()
shutil.copy(here / "x.txt", "y.txt"); shutil.copytree("a", "c"); shutil.move("y.txt", "z.txt")
assert pathlib.Path("z.txt").read_text() == "one" and pathlib.Path("c/b/x.txt").exists()
shutil.rmtree("a"); pathlib.Path("c/b/x.txt").rename("c/w"); pathlib.Path("c/w").unlink()
assert sorted(p.name for p in pathlib.Path(".").iterdir()) == ["c", "z.txt"]
""",
    "archives": """
import zipfile, tarfile
open("x", "w").write("one" * 99)
with zipfile.ZipFile("x.zip", "w", zipfile.ZIP_DEFLATED) as z: z.write("x")
with zipfile.ZipFile("x.zip") as z: assert z.read("x") == b"one" * 99
with tarfile.open("x.tar.gz", "w:gz") as t: t.add("x")
with tarfile.open("x.tar.gz") as t: t.extractall("out")
assert open("out/x").read() == "one" * 99
""",
    "csv and json": """
import csv, io, json
out = io.StringIO(); csv.writer(out).writerows([[1, "a,b"], [2, "c"]])
assert list(csv.reader(io.StringIO(out.getvalue()))) == [["1", "a,b"], ["2", "c"]]
json.dump({"x": [1, 2.5, None]}, open("x.json", "w")); assert json.load(open("x.json")) == {"x": [1, 2.5, None]}
""",
    "sqlite3": """
import sqlite3
for place in (":memory:", "x.db"):
    with sqlite3.connect(place) as base:
        base.execute("create table t (x)"); base.executemany("insert into t values (?)", [(n,) for n in range(5)])
        assert base.execute("select sum(x) from t").fetchone() == (10,)
""",
    "time zones": """
from datetime import datetime, timedelta, timezone
assert datetime(2024, 2, 28, tzinfo=timezone.utc) + timedelta(days=2) == datetime(2024, 3, 1, tzinfo=timezone.utc)
""",
    "hashes, pickles and random numbers": """
import copy, hashlib, pickle, random, secrets, uuid
assert hashlib.sha256(b"x").hexdigest().startswith("2d711642"); assert len(secrets.token_bytes(8)) == 8
random.seed(1); first = random.random(); random.seed(1); assert random.random() == first
assert pickle.loads(pickle.dumps({1: [2]})) == copy.deepcopy({1: [2]}) and uuid.uuid4() != uuid.uuid4()
""",
    "data classes, enums and named tuples": """
from collections import namedtuple, Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum
@dataclass(order=True)
class P:
    x: int
    y: list = field(default_factory=list, compare=False)
class C(Enum): A = 1
T = namedtuple("T", "a b")
assert P(1) < P(2) and C(1) is C.A and T(1, 2).b == 2 and Counter("aab")["a"] == 2
""",
    "errors and logs": """
import logging, traceback, warnings
def f():
    try: 1 / 0
    except ZeroDivisionError:
        logging.exception("no")
        return traceback.format_exc()
assert "ZeroDivisionError" in f()
""",
    "a test case": """
import unittest
class T(unittest.TestCase):
    def test_it(self):
        with self.assertRaises(ValueError): int("x")
assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()
""",
    "an alarm of its own": """
import signal
class Late(Exception): pass
def late(*_): raise Late
old = signal.signal(signal.SIGALRM, late); signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    import time
    time.sleep(5)
except Late: pass
""",
    "whole numbers of C": "import ctypes\nassert ctypes.c_int32(2**31).value == -2**31\nassert (3 * ctypes.py_object)()",
    "output and input": "import sys\nprint('x'); sys.stderr.write('y')\nassert sys.stdin.read() == ''",
    "heaps, caches and generators": """
import bisect, functools, heapq, itertools
h = [3, 1, 2]; heapq.heapify(h); assert heapq.heappop(h) == 1 and bisect.bisect([1, 2, 3], 2) == 2
@functools.lru_cache(None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
assert fib(80) == 23416728348467685 and list(itertools.islice(itertools.count(), 3)) == [0, 1, 2]
""",
}

WITH_PROCESSES = {
    "a pool of processes": """
from multiprocessing import Pool
def square(x): return x * x
with Pool(3) as pool: assert pool.map(square, range(10)) == [x * x for x in range(10)]
""",
    "a queue between processes": """
from multiprocessing import Process, Queue, Value
def work(queue, total):
    for x in range(5): queue.put(x)
    with total.get_lock(): total.value += 1
queue, total = Queue(), Value("i", 0)
processes = [Process(target=work, args=(queue, total)) for _ in range(3)]
for p in processes: p.start()
assert sum(queue.get() for _ in range(15)) == 30
for p in processes: p.join()
assert total.value == 3 and all(p.exitcode == 0 for p in processes)
""",
    "a pool of futures": """
from concurrent.futures import ProcessPoolExecutor
def cube(x): return x ** 3
with ProcessPoolExecutor(2) as pool: assert list(pool.map(cube, range(4))) == [0, 1, 8, 27]
""",
    "a process that is ended": """
import time
from multiprocessing import Process
p = Process(target=time.sleep, args=(60,)); p.start(); p.terminate(); p.join(5)
assert p.exitcode == -15
""",
}
"""Right programs with processes of their own, which need a process namespace."""
