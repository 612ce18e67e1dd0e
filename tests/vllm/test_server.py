"""vLLM's OpenAI server with an artefact's experts, over real HTTP."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.test_experts import CLOSE, reference
from tests.vllm.world import FEW, MANY, prompts, write_world

httpx = pytest.importorskip("httpx")

STARTS = 400.0
"""Seconds until the server must answer."""


@contextlib.contextmanager
def served(command: list[str], port: int, log: Path) -> Iterator[str]:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + STARTS
            while time.monotonic() < end:
                assert process.poll() is None, log.read_text()[-6000:]
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{address}/health").status_code == 200:
                        break
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    from freemoe import FreeMoE
    from freemoe.serve.vllm.settings import serve_command

    root = tmp_path_factory.mktemp("server")
    artefact = write_world(root)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    small = "--dtype float32 --max-model-len 256 --block-size 32 --max-num-seqs 8 --kv-cache-memory-bytes 33554432"
    command = serve_command(artefact, None, [*small.split(), "--port", str(port)])
    with served(command, port, root / "log") as address:
        yield address, FreeMoE.from_pretrained(artefact)


def complete(server: tuple[str, Any], **body: Any) -> Any:
    asked = {"prompt": prompts()[5], "max_tokens": 4, "temperature": 0, "logprobs": 1, "ignore_eos": True, **body}
    return httpx.post(f"{server[0]}/v1/completions", json={**asked, "return_token_ids": True}, timeout=120)


@pytest.mark.parametrize(
    ("body", "expert"),
    [
        ({"model": "base"}, "base"),
        ({"model": f"base:{FEW}"}, FEW),
        ({"model": "base", "vllm_xargs": {"expert": MANY}, "cache_salt": "mine"}, MANY),
        ({"model": f"base:{FEW}+{MANY}"}, f"{FEW}+{MANY}"),
    ],
)
def test_a_models_name_or_vllm_xargs_choose_the_expert(server: tuple[str, Any], body: Any, expert: str) -> None:
    said = complete(server, **body)
    assert said.status_code == 200, said.text
    assert said.headers["x-freemoe-expert"] == expert
    choice = said.json()["choices"][0]
    wanted = reference(server[1], expert, prompts()[5] + choice["token_ids"])[-4:]
    assert max(abs(a - float(b)) for a, b in zip(choice["logprobs"]["token_logprobs"], wanted, strict=True)) <= CLOSE


def test_every_expert_is_a_model(server: tuple[str, Any]) -> None:
    listed = [model["id"] for model in httpx.get(f"{server[0]}/v1/models").json()["data"]]
    assert listed[:2] == ["base", f"base:{FEW}"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "base:law/missing"}, 404, "does not exist"),
        ({"model": "base", "vllm_xargs": {"expert": "law/missing"}}, 400, FEW),
        ({"model": f"base:{FEW}", "vllm_xargs": {"expert": MANY}}, 400, "name one"),
        ({"model": f"base:{FEW}", "use_beam_search": True}, 400, "beam search"),
    ],
)
def test_bad_requests_are_refused_in_openais_shape(server: tuple[str, Any], body: Any, status: int, said: str) -> None:
    answer = complete(server, **body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]
    assert complete(server, model="base").status_code == 200
