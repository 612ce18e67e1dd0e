"""A base with random experts, and engines and servers on it."""

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import torch

from benchmarks.serve.material import run_in_thread
from freemoe import FreeMoE
from freemoe.domain_experts.route.router import train_router
from freemoe.serve.catalogue import ServedExperts
from freemoe.serve.engine.engine import InferenceEngine
from freemoe.serve.engine.requests import SequenceEnd, SequenceRequest, TextChunk
from freemoe.serve.http.app import make_app
from freemoe.serve.http.server import EngineServer
from freemoe.serve.metrics import ServerMetrics
from freemoe.serve.settings import EngineLimits
from tests.domain_experts.test_threads import experts_on
from tests.tiny import save_base, tiny_model, tiny_tokenizer

NAN = 287
"""A token whose embedding is NaN; no text has it, and its logit is always 0, which is never the largest."""


def router_to(names):
    """A router that knows two domains by random features."""
    generator = torch.Generator().manual_seed(0)
    feature = torch.randn(40, 32, generator=generator)
    feature[20:] += 1
    domains = ["x"] * 20 + ["y"] * 20
    return train_router(feature, domains, [names[0]] * 20 + [names[1]] * 20, [str(i) for i in range(40)])[0]


@pytest.fixture(scope="session")
def moe():
    """A tiny Llama with four experts and a router; the token `NAN` breaks it."""
    model = tiny_model("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[NAN] = torch.nan
        model.get_output_embeddings().weight[NAN] = 0
    return FreeMoE(model, experts_on(model), router_to("ab"), tiny_tokenizer())


def write_artefact(folder, base, model, names):
    """Random experts as an artefact of domain experts, with a router, for a base that lies in a folder."""
    moe = FreeMoE(model, experts_on(model, names), router_to(names), tiny_tokenizer())
    return moe.save_pretrained(folder, base=str(base))


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A base, ``own`` experts of it (a, b), ``more`` (c, d), and experts of an ``other`` base."""
    root = tmp_path_factory.mktemp("served")
    model = tiny_model("llama", num_hidden_layers=1)
    for name, held in (("base", model), ("elsewhere", tiny_model("llama", seed=5, num_hidden_layers=1))):
        save_base(held, root / name)
    return SimpleNamespace(
        root=root,
        base=root / "base",
        own=write_artefact(root / "own", root / "base", model, "ab"),
        more=write_artefact(root / "more", root / "base", model, "cd"),
        other=write_artefact(root / "other", root / "elsewhere", held, "ef"),
    )


@pytest.fixture
def no_key(monkeypatch):
    """No key stands in the environment."""
    monkeypatch.delenv("FREEMOE_API_KEY", raising=False)


@pytest.fixture(scope="session")
def whole(folders):
    """All experts on a base of their own, for one request at a time: the reference."""
    host = FreeMoE.from_pretrained(str(folders.base), folders.own, device="cpu")
    host.load_expert(folders.more)
    return host


@contextlib.contextmanager
def engine_on(host, **limits):
    """An engine at work."""
    engine = InferenceEngine(host, EngineLimits(**{"context": 128, "batch": 8, **limits}))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def wait_events(outbox, timeout=60):
    """What an outbox has, at least one event."""
    woken = threading.Event()
    outbox.set_listener(woken.set)
    assert woken.wait(timeout), f"the engine said nothing for {timeout} seconds"
    return outbox.poll_events()


def read(outbox, timeout=60):
    """A whole answer: text, tokens, reason, error."""
    found = SimpleNamespace(text="", tokens=[], reason="", error=None, read=[], pieces=0)
    while True:
        for event in wait_events(outbox, timeout):
            match event:
                case TextChunk():
                    found.text += event.text
                    found.tokens += event.tokens
                    found.pieces += 1
                case SequenceEnd():
                    found.reason, found.error = event.reason, event.error
                    return found
                case _:
                    found.read += event.tokens


def free_port():
    """A port of the loopback that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until(holds, timeout=30):
    """Whether something comes to hold in time."""
    until = time.monotonic() + timeout
    while not (found := holds()) and time.monotonic() < until:
        time.sleep(0.01)
    return bool(found)


def idle(engine, timeout=30):
    """Whether an engine comes to rest."""
    return wait_until(lambda: not engine.num_unfinished, timeout)


def ask(moe, prompt, expert="base", tokens=12, **how):
    """One sequence."""
    return SequenceRequest(tuple(moe.tokenizer(prompt)["input_ids"]), expert, tokens, **how)


def alone(moe, prompt, expert="base", tokens=12):
    """What the model itself says."""
    return moe.generate_text(prompt, expert=expert, max_new_tokens=tokens, do_sample=False)[0]


@contextlib.contextmanager
def served(host, limits=None, **how):
    """A server: ``url``, ``client``, ``engine``, ``metrics``, ``server``."""
    metrics = ServerMetrics()
    engine = InferenceEngine(host, limits or EngineLimits(128, batch=8), metrics).start()
    server = EngineServer(make_app(ServedExperts(engine), metrics, **how), engine, "127.0.0.1", 0)
    with run_in_thread(server) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield SimpleNamespace(url=url, client=client, engine=engine, metrics=metrics, server=server)


@pytest.fixture(scope="session")
def there(moe):
    """One server for all tests that change nothing of it."""
    with served(moe) as found:
        yield found
