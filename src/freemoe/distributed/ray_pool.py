"""Workers on a Ray cluster: actors that load a base once and do unit after unit.

Ray's own restarts and retries are off: which unit is done again, and how often, is the same here as for local processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from freemoe.compat.ray_logs import log_folder
from freemoe.core.environment import DECIDING, package_versions
from freemoe.core.errors import WorkerError
from freemoe.core.run.pool import PoolWorker, WorkerDied, WorkerPool
from freemoe.core.run.progress import LineProgress
from freemoe.core.run.units import Unit
from freemoe.distributed.actor import WorkerActor

RAY_ENDED = (
    "Ray ended: the node that this process was connected to is dead. A node ends when its dashboard agent does (most often for want "
    "of memory). All units that were finished are kept: run the same command again, with --on local:N if it ends again."
)
STORE_BYTES = 256 << 20
"""Of the object store of a local Ray; what does not fit there is kept on disk."""


class RayPool(WorkerPool):
    """Does units by actors of a Ray cluster. They end with `close`, and so does a local Ray that was started for them.

    ``address`` is ``ray://HOST:PORT``; a Ray of this machine alone if None, unless this process is connected to one already.
    There are ``count`` actors at most, one for every accelerator, or machine, if None; ``threads`` is also what each asks the
    cluster for.

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
        self._ours = connect_ray(address, (count or 1) * self._threads)
        self._refs: list[Any] = []
        self._watcher = explain_exit()
        super().__init__(count or 1, again=2, limit=limit)
        try:
            self.count = self._count_workers(count)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the actors, and the local Ray that was started for them."""
        import ray

        # Those who live put away what lies about; nobody waits for one that does not answer.
        leaving = [cast("_RayWorker", worker).actor.leave.remote() for worker in self._idle]
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=10)
        super().close()
        self._refs.clear()
        if self._ours:
            ray.shutdown()
            self._ours = False
        if self._watcher is not None:
            self._watcher.communicate(b"\n")
            self._watcher = None

    def share(self, blob: bytes) -> RayObjectRef:
        """Put bytes into the cluster's object store, for arguments of units; they are kept until `close`."""
        import ray

        parcel = RayObjectRef(ray.put(blob))
        # An object that nobody here refers to may be gone when a new actor asks for it.
        self._refs.append(parcel)
        return parcel

    def _count_workers(self, wanted_count: int | None) -> int:
        """How many actors there may be in the cluster as it is now: one for each accelerator, or machine, if nothing is wanted."""
        import ray

        self._node = ray.get_runtime_context().get_node_id()
        has = ray.cluster_resources()
        room, count = int(has.get("CPU", 0)) // self._threads, sum(bool(node["Alive"]) for node in ray.nodes())
        if self._accelerator:
            count = int(has.get("GPU", 0))
            room = min(room, count)
        if room < 1:
            wanted = f"{self._threads} CPUs" + (" and an accelerator" if self._accelerator else "")
            raise WorkerError(
                f"No worker fits into the Ray cluster: each wants {wanted}, and it has {has.get('CPU', 0):g} CPUs and "
                f"{has.get('GPU', 0):g} accelerators in all. Ask for fewer --threads, or for --device cpu."
            )
        return min(wanted_count or count, room)

    def _start(self) -> tuple[PoolWorker, bool]:
        import ray

        kind: Any = ray.remote(WorkerActor)
        placed = kind.options(
            num_cpus=self._threads, num_gpus=int(self._accelerator), max_restarts=0, max_task_retries=0
        )
        actor = placed.remote(str(Path.cwd()), sys.path, self._threads)
        return _RayWorker(actor, actor.begin.remote(self._needs, package_versions(DECIDING))), False

    def _that_answer(self, workers: Collection[PoolWorker], seconds: float | None) -> list[PoolWorker]:
        import ray

        asked = {worker.answer: worker for worker in cast("Collection[_RayWorker]", workers)}
        done, _ = ray.wait(list(asked), num_returns=1, timeout=seconds)
        return [asked[ref] for ref in done]

    def _advice(self, how: str) -> str:
        return ". Most often memory ran out, or its machine was lost."

    def _backend_error(self) -> WorkerError | None:
        import ray

        with contextlib.suppress(Exception):  # a cluster whose first node is gone does not even answer
            if any(node["Alive"] and node["NodeID"] == self._node for node in ray.nodes()):
                return None
        return WorkerError(RAY_ENDED)


@dataclass(frozen=True)
class RayObjectRef:
    """Bytes in the cluster's object store: a unit's argument, fetched where it is needed."""

    ref: Any

    def get(self) -> bytes:
        """Fetch the bytes from Ray's object store."""
        import ray

        return ray.get(self.ref)


class _RayWorker:
    """An actor, and the answer that it owes."""

    def __init__(self, actor: Any, answer: Any) -> None:
        self.actor = actor
        self.answer = answer

    def send(self, unit: Unit) -> None:
        self.answer = self.actor.do.remote(unit)

    def receive(self) -> tuple[bool, Any]:
        import ray
        import ray.exceptions

        try:
            return pickle.loads(ray.get(self.answer))
        except ray.exceptions.RayError as error:
            self.end()
            raise WorkerDied(_describe_error(error)) from None

    def end(self) -> None:
        import ray

        ray.kill(self.actor)


def _describe_error(error: Exception) -> str:
    """How a worker ended, in a line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.partition(' Worker exit detail')[0].rstrip('. ')}"[:300]


def explain_exit() -> subprocess.Popen[bytes] | None:
    """Start a shell that prints `RAY_ENDED` if Ray's library ends this process; None where it does not (``ray://``)."""
    # The library calls _exit(1) when the object store is gone, which nothing here can catch. The shell waits for a line; when
    # its input ends without one, Ray's log of this process says whether that was why.
    if (logs := log_folder()) is None or os.name != "posix":
        return None
    script = 'read line || { grep -qs "connection to the plasma store is failed" "$0"/python-core-driver-*_$1.log && echo "$2" >&2; }'
    arguments = ["sh", "-c", script, logs, str(os.getpid()), RAY_ENDED]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def connect_ray(address: str | None, cpus: int) -> bool:
    """Connect this process to a cluster, if it is not; whether a local Ray was started for that, or a connection made.

    A Ray of this machine alone, with so many CPUs, if the address is None.
    """
    if address is None:
        set_auth_token()
    # Nobody is told that Ray is used.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"address": address or "local", "logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        options |= {"include_dashboard": False, "num_cpus": cpus, "object_store_memory": STORE_BYTES}
    # Ray waits for half a minute for its own processes, which on a busy machine is not always enough.
    attempts = 1 if address is not None else 3
    where = f"at {address}" if address else "on this machine"
    with LineProgress(logging.getLogger(__name__).warning).stage(f"attempts to start Ray {where}", attempts) as advance:
        for attempt in range(1, attempts + 1):
            try:
                ray.init(**options)
                return True
            except Exception as error:
                ray.shutdown()
                if attempt == attempts:
                    raise WorkerError(
                        f"There is no Ray {where}: {_describe_error(error)}. A cluster is started by `ray start` (docs/elsewhere.md); --on "
                        "ray starts one on this machine alone."
                    ) from error
            finally:
                advance(1)
    return False


def set_auth_token() -> None:
    """Let a Ray of this machine answer to whoever has a token, which stands nowhere but in the environment of its processes.

    Read when ray is imported: who did that before has Ray's own way, and so has who set `RAY_AUTH_MODE`.
    """
    if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
