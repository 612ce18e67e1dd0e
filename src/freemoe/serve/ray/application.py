"""The two deployments of Ray Serve, and their life on a Ray: started, waited for, drained."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
from collections.abc import Iterator
from typing import Any

from freemoe.core.errors import WorkerError
from freemoe.serve.ray.ingress import IngressDeployment
from freemoe.serve.ray.replica import EngineReplica, ReplicaSetup

NAME = "freemoe"
"""Of the application on its cluster."""

_PERIOD = 2.0
"""Seconds between two looks whether a replica is there."""

_QUIET = {"log_level": "WARNING", "enable_access_log": False}


_MARGIN = 64
"""Requests beyond those that a replica's engine takes on: what asks for no sequence."""


def build_application(setup: ReplicaSetup, key: str | None, cpus: float, accelerator: bool) -> Any:
    """What Ray Serve runs: an ingress without a model, and replicas.

    Args:
        setup: Of each replica.
        key: That requests have to show the ingress.
        cpus: That each replica asks Ray for; may be a part of one.
        accelerator: Whether each replica has an accelerator to itself.
    """
    settings = setup.served.settings
    from ray import serve

    common: dict[str, Any] = {
        "health_check_period_s": _PERIOD,
        "graceful_shutdown_wait_loop_s": _PERIOD / 4,
        "logging_config": _QUIET,
    }
    replica: Any = serve.deployment(
        EngineReplica,
        name="Replica",
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_batch + settings.queue + _MARGIN,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        ray_actor_options={"num_cpus": cpus, "num_gpus": int(accelerator)},
        **common,
    )
    ingress: Any = serve.deployment(
        serve.ingress()(IngressDeployment),
        name="Ingress",
        num_replicas=1,
        # More than the ingress lets in, so that it is the one to refuse.
        max_ongoing_requests=2 * settings.request_limits.at_once,
        graceful_shutdown_timeout_s=settings.drain_seconds + 5,
        ray_actor_options={"num_cpus": 0},
        **common,
    )
    return ingress.bind(replica.bind(setup), setup.served, key)


def require_room(replicas: int, cpus: float, accelerator: bool) -> None:
    """Raise where the cluster, as it is now, has no room for all replicas.

    Args:
        replicas: How many.
        cpus: Of each.
        accelerator: Whether each has one.

    Raises:
        WorkerError: Says what it has.
    """
    import ray

    has = ray.cluster_resources()
    wanted = {"CPU": replicas * cpus, "GPU": replicas * int(accelerator)}
    if any(has.get(kind, 0) < count - 1e-6 for kind, count in wanted.items()):
        raise WorkerError(
            f"{replicas} replicas do not fit into the Ray cluster: they want {wanted['CPU']:g} CPUs and {wanted['GPU']} "
            f"accelerators, and it has {has.get('CPU', 0):g} and {has.get('GPU', 0):g} in all. Ask for fewer --replicas, for fewer "
            "--threads, or for --device cpu."
        )


def share_of(cpus: float, replicas: int, threads: int) -> float:
    """What a replica asks a Ray of this machine alone for: its threads, or its part of the machine where that is less."""
    return min(float(threads), math.floor(cpus / replicas * 1000) / 1000)


@contextlib.contextmanager
def run_application(app: Any, host: str, port: int, *, stays: bool) -> Iterator[bool]:
    """Run an application on the Ray that this process is connected to; afterwards it is drained and gone.

    Args:
        app: From `build_application`.
        host: Where every machine with a replica listens, unless Ray Serve listens already.
        port: The same.
        stays: Whether the Ray outlives the application; then Ray Serve is ended there, where it was started for it.

    Yields:
        Whether it listens there; otherwise where Ray Serve was told to when it was started.

    Raises:
        WorkerError: There is one already, or the replicas do not start.
    """
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    there = serve.status()
    if NAME in there.applications:
        raise WorkerError(
            f"An application {NAME!r} runs on this cluster already. End it where it was started, or by `serve shutdown`."
        )
    ours = not there.proxies
    serve.start(http_options={"host": host, "port": port}, logging_config=_QUIET)
    try:
        try:
            serve.run(app, name=NAME, route_prefix="/", logging_config=_QUIET)
        except RuntimeError as error:
            raise WorkerError(f"The replicas did not start: {error}") from None
        yield ours
    finally:
        # No more requests are taken; those that are open are waited for.
        serve.delete(NAME)
        if ours and stays:
            serve.shutdown()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and ctrl-C be a `KeyboardInterrupt` inside a ``with`` block; a second one ends the process at once."""
    told = False

    def interrupt_once(number: int, frame: Any) -> None:
        nonlocal told
        if told:
            os._exit(128 + number)
        told = True
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt_once) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
