"""The server on a Ray: for `freemoe serve --on ray`, and, as ``freemoe.cli.ray_serve:app``, for the files of Ray Serve."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

from freemoe.cli.common import console
from freemoe.cli.served import KEY, Served, Settings, address_of, config_of, longest, open_served, resolve
from freemoe.core.artifacts import read_manifest
from freemoe.core.environment import DECIDING, versions
from freemoe.core.errors import RecipeError, WorkerError
from freemoe.core.files import MANIFEST
from freemoe.core.run.places import Place
from freemoe.results.build import KIND

INSTALL = "Replicas need Ray Serve: pip install 'freemoe[serve-ray]'"

_PACKAGES = ("ray", "grpc_reflection", "watchfiles")
"""Ray, and what Ray Serve cannot be imported without."""

_MARGIN = 64
"""Requests beyond those that a replica's engine takes on: what asks for no sequence."""


def app(args: dict[str, Any]) -> Any:
    """The application for ``import_path`` in a file of Ray Serve.

    The key stands in the environment (`FREEMOE_API_KEY`), not in the file.

    Args:
        args: Fields of `Settings`.

    Raises:
        FreeMoEError: As of `freemoe serve`.
    """
    settings = Settings.model_validate(args)
    key = os.environ.get(KEY) or None
    _require_no_number(settings.device)
    return _application(settings, resolve(settings, key), key, _shape(settings, settings.threads or 1))


def require_ways_to_serve(place: Place, settings: Settings, key: str | None) -> None:
    """Raise where settings do not go with where they are served, or nobody is there.

    Raises:
        RecipeError: Replicas without Ray, several processes, a cluster without a key, a numbered device.
        WorkerError: Ray Serve is not installed, or nobody answers at the cluster's address.
    """
    from freemoe.distributed.executors import require_cluster

    if not place.ray:
        if settings.replicas > 1:
            raise RecipeError(f"--replicas {settings.replicas} needs a Ray: --on ray, or --on ray://HOST:PORT.")
        if place.several:
            raise RecipeError("A server is one process or replicas on a Ray: --on local, ray or ray://HOST:PORT.")
        return
    if missing := lacking():
        raise WorkerError(f"{INSTALL}. Not found: {', '.join(missing)}.")
    _require_no_number(settings.device)
    if place.address is not None:
        if key is None:
            raise RecipeError(
                f"What a cluster serves can be reached by others, so the server needs a key: {KEY} in the environment."
            )
        require_cluster(place.address)


def lacking() -> list[str]:
    """Packages of Ray Serve that are not installed; none is imported, as how a Ray is closed to others is decided before."""
    return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]


def _require_no_number(device: str) -> None:
    if device.startswith("cuda:"):
        raise RecipeError(
            f"--device {device} is a device of one machine; Ray gives each replica one of its own: --device cuda."
        )


def serve_on_ray(settings: Settings, served: Served, place: Place, key: str | None, port: int) -> None:
    """Serve until a signal; then no more requests are taken, and those that run are finished."""
    from freemoe.distributed.ray_pool import connect, keep_to_itself

    if place.address is None:
        # Before ray is imported.
        keep_to_itself()
    import ray

    from freemoe.serve.ray.application import ended_by_signals, require_room, running

    cores = os.cpu_count() or 1
    local = place.address is None
    threads = settings.threads or (max(1, cores // settings.replicas) if local else 1)
    shape = _shape(settings, threads, cores if local else None)
    made = _application(settings, served, key, shape)
    with contextlib.ExitStack() as stack:
        if connect(place.address, cores):
            stack.callback(ray.shutdown)
        require_room(shape)
        # Ray has handlers of its own, which clean nothing up.
        stack.enter_context(ended_by_signals())
        listens = stack.enter_context(running(made, settings.host, port, stays=not local))
        where = (
            address_of(settings.host, port) if listens else "the address of the cluster's Ray Serve, which ran before"
        )
        console.print(f"serving on {where}, {settings.replicas} replicas", markup=False, highlight=False)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


def _shape(settings: Settings, threads: int, cores: int | None = None) -> Any:
    """How many replicas there are, and how large.

    Args:
        settings: What is served.
        threads: CPU threads of each replica.
        cores: Of this machine, where the Ray is of this machine alone: then they share it.
    """
    import torch

    from freemoe.serve.ray.application import Shape, share_of

    return Shape(
        settings.replicas,
        threads,
        float(threads) if cores is None else share_of(cores, settings.replicas, threads),
        settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()),
        settings.max_batch + settings.queue + _MARGIN,
        settings.drain_seconds,
    )


def _application(settings: Settings, served: Served, key: str | None, shape: Any) -> Any:
    """What Ray Serve runs."""
    from freemoe.serve.catalogue import catalogue_of
    from freemoe.serve.http.reading import Bounds
    from freemoe.serve.ray.application import application
    from freemoe.serve.ray.ingress import Door
    from freemoe.serve.ray.replica import Setup

    _, config = config_of(served)
    if config is not None:
        # Told here, and not by every replica that tries to start.
        longest(settings, config)
    served = _anywhere(served)
    catalogue = catalogue_of(_folders(served))
    bounds = Bounds(bytes=settings.max_body_bytes, seconds=settings.patience_seconds)
    needs = [served.base, *(str(source.folder) for source in served.sources)]
    setup = Setup(
        functools.partial(_open_bare, settings, served),
        catalogue,
        bounds,
        served.roots,
        shape.threads,
        tuple(path for path in needs if Path(path).exists()),
        versions(DECIDING),
    )
    at_once = bounds.at_once * settings.replicas
    door = Door(catalogue, Bounds(bounds.bytes, bounds.seconds, at_once=at_once), key, settings.host)
    return application(setup, door, shape)


def _anywhere(served: Served) -> Served:
    """The same with paths that do not depend on where a process works."""
    base = str(Path(served.base).absolute()) if Path(served.base).exists() else served.base
    sources = tuple(type(source)(source.folder.absolute(), source.prefix) for source in served.sources)
    return Served(base, sources, served.names, served.rejected, tuple(root.absolute() for root in served.roots))


def _folders(served: Served) -> list[tuple[Path, str]]:
    """Artefacts of domain experts, each with what is put before its names."""
    base = Path(served.base)
    own = (base / MANIFEST).is_file() and read_manifest(base, check=False).get("kind") == KIND
    return [*([(base, "")] if own else []), *((source.folder, source.prefix) for source in served.sources)]


def _open_bare(settings: Settings, served: Served) -> tuple[Any, Any]:
    """The base and its router; its experts, which have been read and fit, are put onto it when they are asked for."""
    from freemoe.domain_experts.mixture import FreeMoE

    opened, limits = open_served(settings, served)
    if isinstance(opened, FreeMoE):
        opened = FreeMoE(opened.model, [], opened.router, opened.tokenizer)
    return opened, limits
