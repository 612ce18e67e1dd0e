"""The ingress before replicas that stand in this process: whom it lets in, whom it asks, what it says when one is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from freemoe import FreeMoE
from freemoe.distributed.executors import has_ray
from freemoe.distributed.ray_pool import set_auth_token
from freemoe.serve.engine.requests import QueueFullError
from freemoe.serve.ray.ingress import IngressDeployment
from freemoe.serve.ray.replica import EngineReplica, ReplicaSetup
from freemoe.serve.served import resolve_settings
from freemoe.serve.settings import ServeSettings
from tests.serve.conftest import alone

pytestmark = [
    pytest.mark.skipif(not has_ray(), reason="needs ray: pip install 'freemoe[serve-ray]'"),
    # Of Ray Serve's own modules, when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TEXT, EXPERTS = "/v1/completions", "/v1/freemoe/experts"
GOOD = {"model": "base", "prompt": "court?", "max_tokens": 6, "temperature": 0}


class Here(EngineReplica):
    """A replica in this process."""

    name = ""

    def counts(self) -> Any:
        return self.name, list(self._metrics.registry.collect())


class Answer:
    """A stream of a replica, as Ray Serve's."""

    def __init__(self, messages: Any) -> None:
        self._messages = messages

    def __aiter__(self) -> Any:
        return self._messages

    def cancel(self) -> None:
        pass


class Handle:
    """Replicas of this process, asked in turns, as Ray Serve's handle has it. ``lost`` is raised instead of what they say."""

    def __init__(self, *replicas: Here) -> None:
        self.replicas = list(replicas)
        self.asked: list[str] = []
        self.lost: Exception | None = None
        self.after = 0

    def options(self, stream: bool) -> Handle:
        return self

    @property
    def _next(self) -> Here:
        self.replicas = [*self.replicas[1:], self.replicas[0]]
        self.asked.append(self.replicas[-1].name)
        return self.replicas[-1]

    @property
    def answer(self) -> Any:
        return SimpleNamespace(remote=lambda *how: Answer(self._until_lost(self._next.answer(*how))))

    async def _until_lost(self, batches: Any) -> Any:
        number = 0
        async for some in batches:
            for message in some:
                if self.lost is not None and number >= self.after:
                    raise self.lost
                number += 1
                yield [message]

    @property
    def change(self) -> Any:
        return SimpleNamespace(remote=lambda *how: self._next.change(*how))

    def broadcast(self, method: str, *how: Any) -> Any:
        async def results_async(timeout_s: float | None, return_exceptions: bool) -> list[Any]:
            if not self.replicas:
                raise RuntimeError("No replicas.")
            told = [getattr(replica, method)(*how) for replica in self.replicas]
            return [await one if asyncio.iscoroutine(one) else one for one in told]

        return SimpleNamespace(results_async=results_async)


@pytest.fixture(scope="module")
def setup(folders: SimpleNamespace) -> ReplicaSetup:
    settings = ServeSettings(
        base=str(folders.own), expert_root=[folders.root], context=128, max_batch=4, device="cpu", replicas=2
    )
    return ReplicaSetup(resolve_settings(settings, None), 1, (), {})


@pytest.fixture
def handle(setup: ReplicaSetup) -> Iterator[Handle]:
    set_auth_token()
    replicas = [Here(setup), Here(setup)]
    for number, replica in enumerate(replicas):
        replica.name = f"r{number}"
    yield Handle(*replicas)
    for replica in replicas:
        replica._engine.stop()


@pytest.fixture(scope="module")
def whole(folders: SimpleNamespace) -> FreeMoE:
    host = FreeMoE.from_pretrained(str(folders.base), folders.own, device="cpu")
    host.load_expert(folders.more)
    return host


Story = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]


def tell(handle: Handle, setup: ReplicaSetup, story: Story, key: str | None = None, **more: Any) -> IngressDeployment:
    """What a client does, before an ingress of these replicas."""
    settings = setup.served.settings.model_copy(update=more)
    ingress = IngressDeployment(handle, replace(setup.served, settings=settings), key)

    async def run() -> None:
        transport = httpx.ASGITransport(ingress.__serve_build_asgi_app__(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60) as client:
            await story(client)

    asyncio.run(run())
    return ingress


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_replicas_answer_in_turns_and_load_what_they_are_asked_for(
    handle: Handle, setup: ReplicaSetup, whole: FreeMoE
) -> None:
    async def story(client: httpx.AsyncClient) -> None:
        models = [row["id"] for row in (await client.get("/v1/models")).json()["data"]]
        assert [(await client.get(f"/v1/models/{name}")).json()["id"] for name in models] == models
        assert models == ["base", "auto", "base:a", "base:b"]
        for name in ("base", "a", "a", "auto"):
            found = await client.post(TEXT, json={**GOOD, "model": name})
            used = found.headers["x-freemoe-expert"]
            assert found.json()["choices"][0]["text"] == alone(whole, "court?", used, 6)
            assert ("x-freemoe-confidence" in found.headers) == (name == "auto")
        assert error_of(await client.post(TEXT, json={**GOOD, "model": "zz"}), 404)["code"] == "model_not_found"
        page = (await client.get("/metrics")).text
        assert 'freemoe_loaded_experts{replica="r0"} 1.0' in page
        assert 'freemoe_http_responses_total{path="/v1/completions",replica="ingress",status="200"} 4.0' in page
        read = sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("freemoe_requests_total"))
        assert read == 4

    tell(handle, setup, story)
    assert set(handle.asked) == {"r0", "r1"}


def test_the_gate_stands_before_the_replicas(handle: Handle, setup: ReplicaSetup) -> None:
    async def story(client: httpx.AsyncClient) -> None:
        shown = {"authorization": "Bearer " + "k" * 8}
        assert error_of(await client.post(TEXT, json=GOOD), 401)["code"] == "invalid_api_key"
        assert error_of(await client.get("/metrics"), 401)
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/")).headers["content-security-policy"]
        assert error_of(await client.get("/health", headers={"host": "elsewhere"}), 403)
        assert error_of(await client.get("/v1/nothing", headers=shown), 404)["code"] == "unknown_path"
        large = {**GOOD, "prompt": "x" * 3000}
        assert error_of(await client.post(TEXT, json=large, headers=shown), 413)["code"] == "body_too_large"
        assert not handle.asked
        assert error_of(await client.post(TEXT, content=b"{", headers=shown), 415)
        assert (await client.post(TEXT, json=GOOD, headers=shown)).status_code == 200

    tell(handle, setup, story, "k" * 8, max_body_bytes=2048)


def test_experts_come_and_go_on_all_replicas_and_a_new_ingress_knows_them(
    handle: Handle, setup: ReplicaSetup, whole: FreeMoE
) -> None:
    async def load(client: httpx.AsyncClient) -> None:
        done = await client.post(EXPERTS, json={"path": "more", "prefix": "x-"})
        assert done.json()["models"] == ["base:x-c", "base:x-d"]
        for _ in range(2):
            found = await client.post(TEXT, json={**GOOD, "model": "x-c"})
            assert found.json()["choices"][0]["text"] == alone(whole, "court?", "c", 6)
        assert error_of(await client.post(EXPERTS, json={"path": "more", "prefix": "x-"}), 400)
        assert error_of(await client.post(EXPERTS, json={"path": "../elsewhere"}), 403)["code"] == "path_not_allowed"

    tell(handle, setup, load)
    assert [sorted(replica._engine.experts) for replica in handle.replicas] in (
        [["x-c", "x-d"], ["x-c"]],
        [["x-c"], ["x-c", "x-d"]],
    )

    async def drop(client: httpx.AsyncClient) -> None:
        names = [row["name"] for row in (await client.get(EXPERTS)).json()["data"]]
        assert names == ["a", "b", "x-c", "x-d"]
        assert (await client.delete(f"{EXPERTS}/base:x-c")).json()["deleted"] is True
        assert all("x-c" not in replica._engine.host.experts for replica in handle.replicas)
        for _ in range(2):
            assert error_of(await client.post(TEXT, json={**GOOD, "model": "x-c"}), 404)
        assert error_of(await client.delete(f"{EXPERTS}/x-c"), 404)
        assert error_of(await client.delete(f"{EXPERTS}/base"), 404)
        # A replica that starts later has the first catalogue, until it is asked.
        late = Here(setup)
        handle.replicas = [late]
        try:
            assert (await client.post(TEXT, json={**GOOD, "model": "x-d"})).status_code == 200
            assert late._engine.experts == ["x-d"]
        finally:
            late._engine.stop()

    # Not told of what was loaded before: it asks the replicas.
    tell(handle, setup, drop)


def lost() -> Exception:
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


def test_a_replica_that_is_lost_costs_its_answer_an_error(handle: Handle, setup: ReplicaSetup) -> None:
    handle.lost = lost()

    async def story(client: httpx.AsyncClient) -> None:
        found = await client.post(TEXT, json=GOOD)
        assert error_of(found, 503)["code"] == "replica_lost"
        assert found.headers["retry-after"]
        handle.after = 3
        found = await client.post(TEXT, json={**GOOD, "stream": True})
        assert found.status_code == 200
        *parts, last = [json.loads(line.removeprefix("data: ")) for line in found.text.splitlines() if line]
        assert len(parts) == 2
        assert last["error"]["code"] == "replica_lost"
        assert "[DONE]" not in found.text
        handle.lost = None
        assert (await client.post(TEXT, json=GOOD)).status_code == 200

    tell(handle, setup, story)


def test_other_ways_to_get_no_answer(handle: Handle, setup: ReplicaSetup) -> None:
    async def story(client: httpx.AsyncClient) -> None:
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

        for error, status, code in (
            (BackPressureError(num_queued_requests=1, max_queued_requests=1), 429, "queue_full"),
            (DeploymentUnavailableError(None), 503, "no_replica"),  # type: ignore[arg-type]
            (QueueFullError("full"), 429, "queue_full"),
        ):
            handle.lost = error
            found = await client.post(TEXT, json=GOOD)
            assert error_of(found, status)["code"] == code
            assert found.headers["retry-after"]
        handle.lost = ValueError("what only the log may say")
        assert "may say" not in error_of(await client.post(TEXT, json=GOOD), 500)["message"]
        assert (await client.get("/ready")).json() == {"status": "ready", "replicas": 2}
        there, handle.replicas = handle.replicas, []
        # Who has no key cannot keep the replicas busy.
        assert (await client.get("/ready")).status_code == 200
        await asyncio.sleep(1.1)
        assert error_of(await client.get("/ready"), 503)["code"] == "no_replica"
        handle.replicas = there

    tell(handle, setup, story)


def test_a_replica_without_its_files_or_with_other_versions_is_none(setup: ReplicaSetup) -> None:
    from freemoe.core.errors import WorkerError

    with pytest.raises(WorkerError, match="has no '/not/here'"):
        EngineReplica(replace(setup, needs=("/not/here",)))
    with pytest.raises(WorkerError, match=r"instead of 1\.0"):
        EngineReplica(replace(setup, versions={"torch": "1.0"}))


def test_a_replica_whose_engine_has_ended_is_not_healthy(handle: Handle) -> None:
    from freemoe.core.errors import WorkerError

    replica = handle.replicas[0]
    replica.check_health()
    replica._engine.stop()
    with pytest.raises(WorkerError):
        replica.check_health()
