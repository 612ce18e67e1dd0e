"""Workers on a Ray cluster: actors that load a base once and do unit after unit.

Ray's own restarts and retries are off: which unit is done again, and how often, is the same here as for local processes.
"""

from __future__ import annotations

import functools
import os
import pickle
import secrets
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from freemoe.core.environment import DECIDING, versions
from freemoe.core.errors import WorkerError
from freemoe.core.run.pool import Died, Pool, Worker
from freemoe.core.run.units import Unit
from freemoe.distributed.actor import Actor

STORE_BYTES = 256 << 20
"""Of the object store of a local Ray; what does not fit there is kept on disk."""


class RayPool(Pool):
    """Does units by actors of a Ray cluster. They end with `close`, and so does a local Ray that was started for them.

    Args:
        address: ``ray://HOST:PORT``; a Ray of this machine alone if None, unless this process is connected to one already.
        count: Most actors at a time; one for every accelerator, or machine, if None.
        threads: CPU threads of each, and what it asks the cluster for; one if None.
        accelerator: Whether each has an accelerator to itself.
        limit: Seconds after which a unit counts as hung, see `Pool`.
        needs: Paths that units read, on every machine of the cluster.

    Raises:
        WorkerError: There is no cluster at the address, or it has no room for a worker.
    """

    def __init__(
        self,
        address: str | None = None,
        count: int | None = None,
        threads: int | None = None,
        *,
        accelerator: bool = False,
        limit: float | None = None,
        needs: Sequence[str] = (),
    ) -> None:
        self._threads = threads or 1
        self._accelerator = accelerator
        self._needs = [str(Path(path).absolute()) for path in needs if Path(path).exists()]
        self._ours = connect(address, (count or 1) * self._threads)
        self._kept: list[Any] = []
        super().__init__(count or 1, again=2, limit=limit)
        try:
            room = self._room()
        except BaseException:
            self.close()
            raise
        self.count = min(count or self._usual(), room)

    def close(self) -> None:
        """End the actors, and the local Ray that was started for them."""
        import ray

        # Those who live put away what lies about; nobody waits for one that does not answer.
        leaving = [cast("_Remote", worker).leave() for worker in self._idle]
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=10)
        super().close()
        self._kept.clear()
        if self._ours:
            ray.shutdown()
            self._ours = False

    def share(self, blob: bytes) -> Parcel:
        """Put bytes into the cluster's object store, for arguments of units; they are kept until `close`."""
        import ray

        parcel = Parcel(ray.put(blob))
        # An object that nobody here refers to may be gone when a new actor asks for it.
        self._kept.append(parcel)
        return parcel

    def _usual(self) -> int:
        """As many actors as there are accelerators, or machines: each holds a base."""
        import ray

        if self._accelerator:
            return int(ray.cluster_resources().get("GPU", 0))
        return sum(bool(node["Alive"]) for node in ray.nodes())

    def _room(self) -> int:
        """How many actors fit into the cluster, as it is now."""
        import ray

        has = ray.cluster_resources()
        room = int(has.get("CPU", 0)) // self._threads
        if self._accelerator:
            room = min(room, int(has.get("GPU", 0)))
        if room < 1:
            wanted = f"{self._threads} CPUs" + (" and an accelerator" if self._accelerator else "")
            raise WorkerError(
                f"No worker fits into the Ray cluster: each wants {wanted}, and it has {has.get('CPU', 0):g} CPUs and "
                f"{has.get('GPU', 0):g} accelerators in all. Ask for fewer --threads, or for --device cpu."
            )
        return room

    def _start(self) -> tuple[Worker, bool]:
        import ray

        kind: Any = ray.remote(Actor)
        placed = kind.options(
            num_cpus=self._threads, num_gpus=int(self._accelerator), max_restarts=0, max_task_retries=0
        )
        actor = placed.remote(str(Path.cwd()), sys.path, self._threads)
        return _Remote(actor, actor.begin.remote(self._needs, versions(DECIDING))), False

    def _that_answer(self, workers: Collection[Worker], seconds: float | None) -> list[Worker]:
        import ray

        asked = {worker.answer: worker for worker in cast("Collection[_Remote]", workers)}
        done, _ = ray.wait(list(asked), num_returns=1, timeout=seconds)
        return [asked[ref] for ref in done]

    def _advice(self, how: str) -> str:
        return ". Most often memory ran out, or its machine was lost."


@dataclass(frozen=True)
class Parcel:
    """Bytes in the cluster's object store: a unit's argument, fetched where it is needed."""

    ref: Any

    def get(self) -> bytes:
        """The bytes."""
        import ray

        return ray.get(self.ref)


class _Remote:
    """An actor, and the answer that it owes."""

    def __init__(self, actor: Any, answer: Any) -> None:
        self._actor = actor
        self.answer = answer

    def send(self, unit: Unit) -> None:
        self.answer = self._actor.do.remote(unit)

    def leave(self) -> Any:
        """Ask it to put away what it wrote on its machine."""
        return self._actor.leave.remote()

    def receive(self) -> tuple[bool, Any]:
        import ray
        import ray.exceptions

        try:
            return pickle.loads(ray.get(self.answer))
        except ray.exceptions.RayError as error:
            self.end()
            raise Died(_how(error)) from None

    def end(self) -> None:
        import ray

        ray.kill(self._actor)


def _how(error: Exception) -> str:
    """How a worker ended, in a line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.partition(' Worker exit detail')[0].rstrip('. ')}"[:300]


def connect(address: str | None, cpus: int) -> bool:
    """Connect this process to a cluster, if it is not; whether a local Ray was started for that, or a connection made.

    Args:
        address: ``ray://HOST:PORT``; a Ray of this machine alone if None.
        cpus: That a Ray of this machine has.

    Raises:
        WorkerError: There is no Ray.
    """
    if address is None:
        keep_to_itself()
    # Nobody is told that Ray is used.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        return False
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    if address is not None:
        begin = functools.partial(ray.init, address=address, **quiet)
    else:
        size = {"num_cpus": cpus, "object_store_memory": STORE_BYTES}
        begin = functools.partial(ray.init, address="local", include_dashboard=False, **size, **quiet)
    # Ray waits for half a minute for its own processes, which on a busy machine is not always enough.
    attempts = 1 if address is not None else 3
    for attempt in range(1, attempts + 1):
        try:
            begin()
            return True
        except Exception as error:
            ray.shutdown()
            if attempt < attempts:
                continue
            where = f"at {address}" if address else "on this machine"
            raise WorkerError(
                f"There is no Ray {where}: {_how(error)}. A cluster is started by `ray start` (docs/elsewhere.md); --on ray starts "
                "one on this machine alone."
            ) from error
    return False


def keep_to_itself() -> None:
    """Let a Ray of this machine answer to whoever has a token, which stands nowhere but in the environment of its processes.

    Read when ray is imported: who did that before has Ray's own way, and so has who set `RAY_AUTH_MODE`.
    """
    if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
