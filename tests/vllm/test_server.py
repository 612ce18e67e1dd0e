"""`freemoe serve --engine vllm`: vLLM's OpenAI server with an artefact's experts, over real HTTP."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from tests.vllm.test_experts import CLOSE, reference
from tests.vllm.world import FEW, MANY, prompts, write_world

httpx = pytest.importorskip("httpx")

KEY = "a-key-of-the-tests"
HEADERS = {"authorization": f"Bearer {KEY}"}
STARTS = 400.0
"""Seconds until the server must answer."""


@contextlib.contextmanager
def serving(folder, root):
    """`freemoe serve FOLDER --engine vllm` on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    small = f"--engine vllm --dtype float32 --context 256 --max-batch 8 --port {port}"
    command = [sys.executable, "-m", "freemoe", "serve", str(folder), *small.split()]
    log = root / "log"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "FREEMOE_API_KEY": KEY,
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
def server(tmp_path_factory):
    from freemoe import FreeMoE

    root = tmp_path_factory.mktemp("server")
    artefact = write_world(root)
    with serving(artefact, root) as address:
        yield address, FreeMoE.from_pretrained(artefact)


def complete(server, **body):
    asked = {"prompt": prompts()[5], "max_tokens": 4, "temperature": 0, "logprobs": 1, "ignore_eos": True, **body}
    return httpx.post(
        f"{server[0]}/v1/completions", json={**asked, "return_token_ids": True}, timeout=120, headers=HEADERS
    )


@pytest.mark.parametrize(
    ("body", "expert"),
    [
        ({"model": "base"}, "base"),
        ({"model": f"base:{FEW}"}, FEW),
        ({"model": "base", "vllm_xargs": {"expert": MANY}, "cache_salt": "mine"}, MANY),
        ({"model": f"base:{FEW}+{MANY}"}, f"{FEW}+{MANY}"),
    ],
)
def test_a_models_name_or_vllm_xargs_choose_the_expert(server, body, expert):
    said = complete(server, **body)
    assert said.status_code == 200, said.text
    assert said.headers["x-freemoe-expert"] == expert
    choice = said.json()["choices"][0]
    wanted = reference(server[1], expert, prompts()[5] + choice["token_ids"])[-4:]
    assert max(abs(a - float(b)) for a, b in zip(choice["logprobs"]["token_logprobs"], wanted, strict=True)) <= CLOSE


def test_every_expert_is_a_model(server):
    listed = [model["id"] for model in httpx.get(f"{server[0]}/v1/models", headers=HEADERS).json()["data"]]
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
def test_bad_requests_are_refused_in_openais_shape(server, body, status, said):
    answer = complete(server, **body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]
    assert complete(server, model="base").status_code == 200


def test_it_asks_for_the_key(server):
    assert httpx.get(f"{server[0]}/v1/models").status_code == 401


def test_a_converted_model_in_processes_of_their_own(tmp_path):
    from tests.vllm.test_models import CONVERTED, compare, write_converted

    folder = write_converted(tmp_path / "half", *CONVERTED["llama"])
    with serving(folder, tmp_path) as address:
        require_close(address, "base:converted", lambda steps, answers: compare(folder, steps, answers))


def test_a_trimmed_mixture_in_processes_of_their_own(tmp_path):
    from tests.vllm.test_models import TRIMMED, compare, write_trimmed

    folder = write_trimmed(tmp_path, *TRIMMED["mixtral"])
    with serving(folder, tmp_path) as address:
        require_close(address, "base:trimmed", lambda steps, answers: compare(folder, steps, answers))
        # Its base as it is would be another model.
        assert complete((address, None), model="base").status_code == 404


def require_close(address, model, compare):
    """Ask once, and hold the answer against transformers'."""
    said = complete((address, None), model=model)
    assert said.status_code == 200, said.text
    choice = said.json()["choices"][0]
    answer = {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}
    assert compare([{"batch": [{"ids": prompts()[5], "new": 4}]}], [[answer]]) <= CLOSE
