"""The server on a Ray: for `freemoe serve --on ray`, and, as ``freemoe.serve.ray.launch:app``, for the files of Ray Serve."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from freemoe.core.environment import DECIDING, package_versions
from freemoe.core.errors import RecipeError, WorkerError
from freemoe.core.run.places import ExecutorSpec
from freemoe.distributed.executors import require_cluster
from freemoe.distributed.ray_pool import connect_ray, set_auth_token
from freemoe.serve.ray.replica import EngineReplica
from freemoe.serve.served import ServeTarget, resolve_settings
from freemoe.serve.settings import KEY, ServeSettings, address_of

_NAME = "freemoe"

_PERIOD = 2.0
"""Seconds between two looks whether a replica is there."""

_QUIET = {"log_level": "WARNING", "enable_access_log": False}


def app(args: dict[str, Any]) -> Any:
    """The application for ``import_path`` in a file of Ray Serve.

    The key stands in the environment (`FREEMOE_API_KEY`), not in the file.

    ``args`` are fields of `ServeSettings`.
    """
    settings = ServeSettings.model_validate(args)
    key = os.environ.get(KEY) or None
    _require_no_number(settings.device)
    threads = settings.threads or 1
    return build_application(resolve_settings(settings, key), key, threads, float(threads))


def build_application(served: ServeTarget, key: str | None, threads: int, cpus: float) -> Any:
    """What Ray Serve runs: replicas behind its proxy.

    The ``cpus`` that each replica asks Ray for may be a part of one.
    """
    from ray import serve

    settings = served.settings
    _, config = served.base_config()
    if config is not None:
        # Told here, and not by every replica that tries to start.
        served.engine_limits(SimpleNamespace(config=config))
    if Path(served.base).exists():
        served = replace(served, base=str(Path(served.base).absolute()))
    paths = [served.base, *(str(source.folder) for source in served.sources)]
    deployment: Any = serve.deployment(
        serve.ingress()(EngineReplica),
        name="Replica",
        num_replicas=settings.replicas,
        # More than a replica lets in, so that it is the one to refuse.
        max_ongoing_requests=2 * settings.request_limits.at_once,
        health_check_period_s=_PERIOD,
        graceful_shutdown_wait_loop_s=_PERIOD / 4,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        ray_actor_options={"num_cpus": cpus, "num_gpus": int(_wants_accelerator(settings))},
        logging_config=_QUIET,
    )
    needs = [path for path in paths if Path(path).exists()]
    return deployment.bind(served, key, threads, needs, package_versions(DECIDING))


def require_ray(place: ExecutorSpec, settings: ServeSettings, key: str | None) -> None:
    """Raise where there is no Ray that could serve.

    Raises:
        RecipeError: A cluster without a key, a numbered device.
        WorkerError: Ray Serve is not installed, or nobody answers at the cluster's address.
    """
    if missing := missing_packages():
        raise WorkerError(
            f"Replicas need Ray Serve: pip install 'freemoe[serve-ray]'. Not found: {', '.join(missing)}."
        )
    _require_no_number(settings.device)
    if place.address is not None:
        if key is None:
            raise RecipeError(
                f"What a cluster serves can be reached by others, so the server needs a key: {KEY} in the environment."
            )
        require_cluster(place.address)


def missing_packages() -> list[str]:
    """Packages of Ray Serve that are not installed; none is imported, as how a Ray is closed to others is decided before."""
    # Ray, and what Ray Serve cannot be imported without.
    return [name for name in ("ray", "grpc_reflection", "watchfiles") if importlib.util.find_spec(name) is None]


def _require_no_number(device: str) -> None:
    if device.startswith("cuda:"):
        raise RecipeError(
            f"--device {device} is a device of one machine; Ray gives each replica one of its own: --device cuda."
        )


def _wants_accelerator(settings: ServeSettings) -> bool:
    import torch

    return settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())


def require_room(replicas: int, cpus: float, accelerator: bool) -> None:
    """Raise where the cluster, as it is now, has no room for all replicas; ``cpus`` and ``accelerator`` are each one's."""
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


def serve_on_ray(
    served: ServeTarget, key: str | None, port: int, tell: Callable[[str], None], address: str | None
) -> None:
    """Serve until a signal; then no more requests are taken, and those that run are finished."""
    if address is None:
        # Before ray is imported. Its Serve gives its proxy five seconds to start, too few on a machine that is busy, and ends it.
        set_auth_token()
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    import ray
    from ray import serve

    settings, cores = served.settings, os.cpu_count() or 1
    replicas = settings.replicas
    threads = settings.threads or (max(1, cores // replicas) if address is None else 1)
    # A Ray of this machine alone is shared by them.
    cpus = share_of(cores, replicas, threads) if address is None else float(threads)
    built = build_application(served, key, threads, cpus)
    with contextlib.ExitStack() as stack:
        if connect_ray(address, cores):
            stack.callback(ray.shutdown)
        require_room(replicas, cpus, _wants_accelerator(settings))
        # Ray has handlers of its own, which clean nothing up. A second signal ends the wait for running requests.
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, signal.default_int_handler))
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        status = serve.status()
        if _NAME in status.applications:
            raise WorkerError(
                f"An application {_NAME!r} runs on this cluster already. End it where it was started, or by `serve shutdown`."
            )
        serve.start(http_options={"host": settings.host, "port": port}, logging_config=_QUIET)
        if address is not None and not status.proxies:
            stack.callback(serve.shutdown)
        # No more requests are taken; those that are open are waited for.
        stack.callback(serve.delete, _NAME)
        try:
            serve.run(built, name=_NAME, route_prefix="/", logging_config=_QUIET)
        except RuntimeError as error:
            raise WorkerError(f"The replicas did not start: {error}") from None
        where = "the address of the cluster's Ray Serve, which ran before"
        tell(f"serving on {where if status.proxies else address_of(settings.host, port)}, {replicas} replicas")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
