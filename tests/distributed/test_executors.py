"""Who does the units of a recipe, and the refusals before anything expensive."""

import socket

import pytest

from freemoe.core.errors import WorkerError
from freemoe.core.run.processes import ProcessPool
from freemoe.distributed import executors
from freemoe.distributed.executors import executor_of, require_place
from freemoe.recipes import recipe_from


def recipe(**fields):
    return recipe_from({"command": "build", "model": "base", "domains": {"law": ["law.jsonl"]}, **fields})


def test_processes_share_the_threads_unless_they_are_told_theirs():
    import torch

    pool = executor_of(recipe(place="local:3", threads=2, unit_seconds=60))
    assert isinstance(pool, ProcessPool)
    assert (pool.count, pool.threads, pool.limit) == (3, 2, 60)
    pool = executor_of(recipe(workers=2))
    assert isinstance(pool, ProcessPool)
    assert (pool.count, pool.threads) == (2, max(1, torch.get_num_threads() // 2))


def test_what_a_recipe_reads_is_looked_for_on_every_machine(tmp_path):
    asked = recipe(domains={"law": ["law.jsonl@5"], "wiki": ["text:notes.txt"]}, data={"root": "data"}, output="out")
    found = set(executors._input_paths(asked.model_dump(mode="json")))
    assert {"base", "notes.txt", "data"} <= found
    assert "out" not in found


def test_without_ray_nothing_is_begun(monkeypatch):
    require_place(recipe(place="local:2"))
    monkeypatch.setattr(executors, "has_ray", lambda: False)
    with pytest.raises(WorkerError, match=r"pip install 'freemoe\[ray\]'"):
        require_place(recipe(place="ray"))


def test_where_nobody_answers_nothing_is_begun(monkeypatch):
    monkeypatch.setattr(executors, "has_ray", lambda: True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(WorkerError, match=rf"Nobody answers at ray://127.0.0.1:{port} .*ray start --head"):
        require_place(recipe(place=f"ray://127.0.0.1:{port}"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        require_place(recipe(place=f"ray://127.0.0.1:{listening.getsockname()[1]}"))
