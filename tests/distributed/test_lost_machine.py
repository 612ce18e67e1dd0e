"""A cluster of machines, one of which is lost: three nodes of Ray on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_ray_pool import needs_ray

pytestmark = [needs_ray, pytest.mark.slow]

# The first node has no CPU for units, and is the one that answers; each of the other two has one.
SCRIPT = """
import json
from ray.cluster_utils import Cluster
from freemoe.core.run.units import Unit
from freemoe.distributed.ray_pool import RayPool

small = {"object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
units = [Unit(f"u{n}", "tests.core.run.light_work:where", {"number": n, "wait": 0.3}) for n in range(6)]
found, lost, seen = {}, "", set()
with RayPool(cluster.address, count=2, threads=1) as pool:
    while len(seen) < 2:
        seen |= {node for _, (_, node) in pool.run(units[:2])}
    for unit, (number, node) in pool.run(units):
        found[unit.name] = [number, node]
        if not lost:
            lost = node
            cluster.remove_node(next(n for n in nodes if n.node_id == node))
    again = sorted(number for _, (number, _) in pool.run(units[:3]))
print(json.dumps({"found": found, "lost": lost, "again": again}))
cluster.shutdown()
"""


def test_what_a_lost_machine_was_at_is_done_by_the_other(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert {name: number for name, (number, _) in result["found"].items()} == {f"u{n}": n * n for n in range(6)}
    assert result["lost"]
    # On the machine that is left alone, whose only place a worker has.
    assert result["again"] == [0, 1, 4]
