"""Who does the units of a recipe."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from typing import Any

from freemoe.core.errors import WorkerError
from freemoe.core.run.places import ExecutorSpec, executor_spec_of
from freemoe.core.run.pool import WorkerPool
from freemoe.core.run.processes import ProcessPool

INSTALL = "Running on Ray needs the package of that name: pip install 'freemoe[ray]'"

_READ = ("model", "base", "artefact", "text", "domains", "root", "data_root", "task_folder")
"""Fields of recipes, and of their sections, that may name files."""


def executor_of(recipe: Any) -> WorkerPool:
    """Who does a recipe's units: processes of this machine, or actors on Ray."""
    plain = recipe.model_dump(mode="json")
    return make_pool(
        executor_spec_of(recipe),
        plain.get("threads"),
        plain.get("device"),
        recipe.unit_seconds,
        list(_input_paths(plain)),
    )


def has_ray() -> bool:
    """Whether the package ray is installed."""
    return importlib.util.find_spec("ray") is not None


def require_place(recipe: Any) -> None:
    """Raise before the expensive part where a recipe's units can be done nowhere.

    Raises:
        WorkerError: Ray is not installed, or nobody answers at the cluster's address.
    """
    place = executor_spec_of(recipe)
    if not place.ray:
        return
    if not has_ray():
        raise WorkerError(f"{INSTALL}.")
    if place.address is not None:
        require_cluster(place.address)


def require_cluster(address: str) -> None:
    """Raise where nobody answers at a cluster's address, ``ray://HOST:PORT``."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise WorkerError(
            f"Nobody answers at {address} ({error}). Start a cluster there by `ray start --head "
            f"--ray-client-server-port={port}` (docs/elsewhere.md), or give --on ray: that starts one on this machine alone."
        ) from None


def make_pool(
    place: ExecutorSpec,
    threads: int | None = None,
    device: object = None,
    limit: float | None = None,
    needs: list[str] | None = None,
) -> WorkerPool:
    """Workers at a place.

    ``threads``: CPU threads of each; by default they share those of this process. Sums depend on it: one that is asked for is
    that of every worker, however many there are. ``needs`` are paths that units read, checked on every machine.
    """
    import torch

    own = threads or max(1, torch.get_num_threads() // (place.workers or 1))
    if not place.ray:
        return ProcessPool(place.workers or 1, own, limit)
    from freemoe.distributed.ray_pool import RayPool

    accelerator = str(device).startswith("cuda") or (device in ("auto", "split") and torch.cuda.is_available())
    return RayPool(place.address, place.workers, own, accelerator=accelerator, limit=limit, needs=needs or ())


def _input_paths(plain: Any, reads: bool = False) -> Iterator[str]:
    """What a recipe as plain data names that may be a file or a folder."""
    if isinstance(plain, dict):
        for name, value in plain.items():
            yield from _input_paths(value, reads or name in _READ)
    elif isinstance(plain, list):
        for value in plain:
            yield from _input_paths(value, reads)
    elif isinstance(plain, str) and reads:
        yield plain
        # A task may say what the file is: text:notes.txt.
        yield from [plain.partition(":")[2]] if ":" in plain else []
