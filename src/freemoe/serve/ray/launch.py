"""The server on a Ray: for `freemoe serve --on ray`, and, as ``freemoe.serve.ray.launch:app``, for the files of Ray Serve."""

from __future__ import annotations

import contextlib
import importlib.util
import os
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
from freemoe.serve.listening import address_of
from freemoe.serve.ray.application import build_application, ended_by_signals, require_room, run_application, share_of
from freemoe.serve.ray.replica import ReplicaSetup
from freemoe.serve.served import ServeTarget, resolve_settings
from freemoe.serve.settings import KEY, ServeSettings

INSTALL = "Replicas need Ray Serve: pip install 'freemoe[serve-ray]'"

_PACKAGES = ("ray", "grpc_reflection", "watchfiles")
"""Ray, and what Ray Serve cannot be imported without."""


def app(args: dict[str, Any]) -> Any:
    """The application for ``import_path`` in a file of Ray Serve.

    The key stands in the environment (`FREEMOE_API_KEY`), not in the file.

    Args:
        args: Fields of `ServeSettings`.

    Raises:
        FreeMoEError: As of `freemoe serve`.
    """
    settings = ServeSettings.model_validate(args)
    key = os.environ.get(KEY) or None
    _require_no_number(settings.device)
    setup = _build_replica_setup(resolve_settings(settings, key), settings.threads or 1)
    return build_application(setup, key, float(setup.threads), _wants_accelerator(settings))


def require_ray(place: ExecutorSpec, settings: ServeSettings, key: str | None) -> None:
    """Raise where there is no Ray that could serve.

    Raises:
        RecipeError: A cluster without a key, a numbered device.
        WorkerError: Ray Serve is not installed, or nobody answers at the cluster's address.
    """
    if missing := missing_packages():
        raise WorkerError(f"{INSTALL}. Not found: {', '.join(missing)}.")
    _require_no_number(settings.device)
    if place.address is not None:
        if key is None:
            raise RecipeError(
                f"What a cluster serves can be reached by others, so the server needs a key: {KEY} in the environment."
            )
        require_cluster(place.address)


def missing_packages() -> list[str]:
    """Packages of Ray Serve that are not installed; none is imported, as how a Ray is closed to others is decided before."""
    return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]


def _require_no_number(device: str) -> None:
    if device.startswith("cuda:"):
        raise RecipeError(
            f"--device {device} is a device of one machine; Ray gives each replica one of its own: --device cuda."
        )


def serve_on_ray(
    served: ServeTarget, key: str | None, port: int, tell: Callable[[str], None], address: str | None
) -> None:
    """Serve until a signal; then no more requests are taken, and those that run are finished.

    Args:
        served: What is served.
        key: That requests have to show.
        port: Where to listen.
        tell: Is told the address.
        address: Of the cluster; None for a Ray of this machine alone.
    """
    if address is None:
        # Before ray is imported.
        set_auth_token()
    import ray

    settings, cores = served.settings, os.cpu_count() or 1
    replicas = settings.replicas
    threads = settings.threads or (max(1, cores // replicas) if address is None else 1)
    # A Ray of this machine alone is shared by them.
    cpus = share_of(cores, replicas, threads) if address is None else float(threads)
    accelerator = _wants_accelerator(settings)
    made = build_application(_build_replica_setup(served, threads), key, cpus, accelerator)
    with contextlib.ExitStack() as stack:
        if connect_ray(address, cores):
            stack.callback(ray.shutdown)
        require_room(replicas, cpus, accelerator)
        # Ray has handlers of its own, which clean nothing up.
        stack.enter_context(ended_by_signals())
        listens = stack.enter_context(run_application(made, settings.host, port, stays=address is not None))
        where = (
            address_of(settings.host, port) if listens else "the address of the cluster's Ray Serve, which ran before"
        )
        tell(f"serving on {where}, {replicas} replicas")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


def _wants_accelerator(settings: ServeSettings) -> bool:
    import torch

    return settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())


def _build_replica_setup(served: ServeTarget, threads: int) -> ReplicaSetup:
    """What every replica is made of."""
    _, config = served.base_config()
    if config is not None:
        # Told here, and not by every replica that tries to start.
        served.engine_limits(SimpleNamespace(config=config))
    if Path(served.base).exists():
        served = replace(served, base=str(Path(served.base).absolute()))
    needs = [served.base, *(str(source.folder) for source in served.sources)]
    return ReplicaSetup(
        served, threads, tuple(path for path in needs if Path(path).exists()), package_versions(DECIDING)
    )
