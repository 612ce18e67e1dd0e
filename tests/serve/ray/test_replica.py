"""Replicas that stand in this process: the single server's answers, experts that come and go on all of them, one page of numbers."""

import asyncio

import httpx
import pytest

from freemoe.core.errors import WorkerError
from freemoe.distributed.executors import has_ray
from freemoe.serve.ray.replica import EngineReplica
from freemoe.serve.served import resolve_settings
from freemoe.serve.settings import ServeSettings
from tests.serve.conftest import alone

pytestmark = pytest.mark.skipif(not has_ray(), reason="needs ray: pip install 'freemoe[serve-ray]'")

TEXT, EXPERTS, KEY = "/v1/completions", "/v1/freemoe/experts", "k" * 8
GOOD = {"model": "base", "prompt": "court?", "max_tokens": 6, "temperature": 0}


class Replica(EngineReplica):
    """One of several in this process, which reaches the others by ``peers``."""

    def __init__(self, served, peers):
        super().__init__(served, KEY, 1, (), {})
        self.name, self.peers = f"r{len(peers)}", peers
        peers.append(self)
        transport = httpx.ASGITransport(self.__serve_build_asgi_app__(), raise_app_exceptions=False)
        how = {"base_url": "http://127.0.0.1:8000", "timeout": 60, "headers": {"authorization": f"Bearer {KEY}"}}
        self.client = httpx.AsyncClient(transport=transport, **how)

    def counts(self):
        return self.name, list(self._metrics.registry.collect())

    async def call_replicas(self, method, *arguments, seconds=None):
        said = [getattr(peer, method)(*arguments) for peer in self.peers]
        return [await one if asyncio.iscoroutine(one) else one for one in said]


@pytest.fixture(scope="module")
def served(folders):
    settings = ServeSettings(
        base=str(folders.own), expert_root=[folders.root], context=128, max_batch=4, device="cpu", replicas=2
    )
    return resolve_settings(settings, KEY)


@pytest.fixture
def replicas(served):
    peers = []
    Replica(served, peers), Replica(served, peers)
    yield peers
    for replica in peers:
        replica._engine.stop()


def test_each_answers_as_the_single_server_and_loads_what_it_is_asked_for(replicas, whole):
    async def story():
        for replica in replicas:
            client = replica.client
            models = [row["id"] for row in (await client.get("/v1/models")).json()["data"]]
            assert models == ["base", "auto", "base:a", "base:b"]
            assert replica._engine.experts == []
            for name in ("base", "a", "auto"):
                found = await client.post(TEXT, json={**GOOD, "model": name})
                used = found.headers["x-freemoe-expert"]
                assert found.json()["choices"][0]["text"] == alone(whole, "court?", used, 6)
            assert (await client.post(TEXT, json=GOOD, headers={"authorization": ""})).status_code == 401
            assert (await client.get("/ready", headers={"authorization": ""})).status_code == 200
        page = (await client.get("/metrics")).text
        assert 'freemoe_loaded_experts{replica="r0"}' in page
        assert 'freemoe_http_responses_total{path="/v1/completions",replica="r1",status="200"} 3.0' in page
        read = sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("freemoe_requests_total"))
        assert read == 6

    asyncio.run(story())


def test_experts_come_and_go_on_all_and_one_that_starts_later_knows_them(replicas, served, whole, monkeypatch):
    monkeypatch.setattr("freemoe.serve.ray.replica._PERIOD", 0.1)

    async def ask(replica, name):
        return await replica.client.post(TEXT, json={**GOOD, "model": name})

    async def story():
        first, second = replicas
        done = await first.client.post(EXPERTS, json={"path": "more", "prefix": "x-"})
        assert done.json()["models"] == ["base:x-c", "base:x-d"]
        assert (first._engine.experts, second._engine.experts) == (["x-c", "x-d"], [])
        assert (await ask(second, "x-c")).json()["choices"][0]["text"] == alone(whole, "court?", "c", 6)
        again = await second.client.post(EXPERTS, json={"path": "more", "prefix": "x-"})
        assert again.status_code == 400
        assert (await second.client.delete(f"{EXPERTS}/base:x-c")).json()["deleted"] is True
        late = Replica(served, replicas)
        for replica in replicas:
            assert (await ask(replica, "x-c")).status_code == 404
            assert "x-c" not in replica._engine.host.experts
            assert (await ask(replica, "x-d")).status_code == 200
            assert (await replica.client.delete(f"{EXPERTS}/x-c")).status_code == 404
        assert late._engine.experts == ["x-d"]
        # Two change something at the same moment; an announcement that is lost is made up for.
        late.peers = [late]
        loads = (one.client.post(EXPERTS, json={"path": "more", "prefix": f"{one.name}-"}) for one in (first, second))
        await asyncio.gather(*loads, late.client.delete(f"{EXPERTS}/x-d"))
        names = ["base:a", "base:b", "base:r0-c", "base:r0-d", "base:r1-c", "base:r1-d"]
        late.peers = replicas
        async with asyncio.timeout(30):
            while any(len(replica.catalogue().entries) != len(names) for replica in replicas):
                await asyncio.sleep(0.05)
        for replica in replicas:
            models = [row["id"] for row in (await replica.client.get("/v1/models")).json()["data"]]
            assert sorted(models) == ["auto", "base", *names]

    asyncio.run(story())


def test_a_replica_without_its_files_or_with_other_versions_is_none(served):
    with pytest.raises(WorkerError, match="has no '/not/here'"):
        EngineReplica(served, None, 1, ("/not/here",), {})
    with pytest.raises(WorkerError, match=r"instead of 1\.0"):
        EngineReplica(served, None, 1, (), {"torch": "1.0"})


def test_a_replica_whose_engine_has_ended_is_not_healthy(replicas):
    replicas[0].check_health()
    replicas[0]._engine.stop()
    with pytest.raises(WorkerError):
        replicas[0].check_health()
