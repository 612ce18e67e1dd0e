"""The benchmark of the server; its rival is started as it should be, asked by the same clients, and ended: a script stands in."""

import json
import math
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness import Settings, run_bench
from benchmarks.serve import vllm_lora
from benchmarks.serve.benchmark import percentile
from benchmarks.serve.material import NAMES, open_base
from freemoe.core.errors import DataError, FreeMoEError

STAND_IN = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

given = sys.argv[1:]
Path({log!r}).write_text(json.dumps(given))
for adapter in given[given.index("--lora-modules") + 1 :]:
    assert Path(adapter.partition("=")[2], "adapter_config.json").is_file(), adapter
assert Path(given[given.index("--model") + 1], "config.json").is_file()


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        used = {{"completion_tokens": asked["max_tokens"]}}
        for said in ({{"choices": [{{"text": "a"}}]}}, {{"choices": [{{"text": "b"}}]}}, {{"choices": [], "usage": used}}):
            self.wfile.write(b"data: " + json.dumps(said).encode() + b"\\n\\n")

    log_message = lambda *_: None


ThreadingHTTPServer(("127.0.0.1", int(given[given.index("--port") + 1])), Answers).serve_forever()
"""


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_quick_run_beside_a_rival(tmp_path, monkeypatch):
    seen = tmp_path / "seen"
    python = script(tmp_path / "python", STAND_IN.format(python=sys.executable, log=str(seen)))
    monkeypatch.setenv(vllm_lora.PYTHON, str(python))
    found = run_bench("serve", Settings(quick=True))
    figures = {figure["name"]: figure for figure in found["figures"]}
    clients = ("1 client", "4 clients")
    assert list(figures)[:2] == [f"tokens/s of {who}, over one request at a time" for who in clients]
    assert all(figure["value"] > 0 for figure in figures.values())
    assert found["details"]["runner"] == "SlotRunner"
    assert "tokens/s of 1 client, over vLLM with LoRA" in figures
    assert "by vLLM" in figures["tokens/s of 4 clients, over vLLM with LoRA"]["note"]
    assert found["details"]["vllm"][4][0]["tokens"] == found["details"]["clients"][4][0]["tokens"] > 0
    given = json.loads(seen.read_text())
    assert [m.partition("=")[0] for m in given[given.index("--lora-modules") + 1 :]] == list(NAMES)


def test_percentiles():
    values = [float(i) for i in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile([7.0], 0.95)) == (50, 95, 7)
    assert math.isnan(percentile([], 0.5))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_rival_that_does_not_start_says_why_and_nothing_of_it_is_left(tmp_path):
    # The server ends when it is told; what it started would stay.
    program = f"#!/bin/sh\nsleep 300 & echo $! > {tmp_path}/child\necho broken >&2\nexit 1\n"
    python = script(tmp_path / "python", program)
    with (
        pytest.raises(FreeMoEError, match="does not answer: broken"),
        vllm_lora.vllm_serving(str(python), open_base(Settings()), 4, 64),
    ):
        pass
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    until = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_python_has_to_be_one(tmp_path, monkeypatch):
    monkeypatch.delenv(vllm_lora.PYTHON, raising=False)
    assert vllm_lora.python_with_vllm() is None
    monkeypatch.setenv(vllm_lora.PYTHON, str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"absent.*cannot be run.*docs/vllm.md"):
        vllm_lora.python_with_vllm()
