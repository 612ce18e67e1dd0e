"""A cluster of machines, one of which is lost (three nodes of Ray on this one), and a Ray of this machine that ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_pools import needs_ray

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


def run(tmp_path, script, *arguments):
    (tmp_path / "script.py").write_text(script)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    own = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path}
    command = [sys.executable, str(tmp_path / "script.py"), *arguments]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=240, check=False)


# The dashboard agent is killed while a unit is at work; with bytes in the object store Ray's library then ends this process.
AGENT = """
import os, sys, threading, time
from pathlib import Path
from freemoe.core.errors import WorkerError
from freemoe.core.run.units import Unit
from freemoe.distributed.ray_pool import RayPool

def parent(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]

def kill_agent():
    for folder in Path("/proc").iterdir():
        try:
            name = (folder / "cmdline").read_text()
            if name.startswith("ray::DashboardAgent") and parent(parent(folder.name)) == str(os.getpid()):
                os.kill(int(folder.name), 9)
        except (OSError, ValueError):
            pass

with RayPool(count=1, threads=1) as pool:
    if sys.argv[1] == "stored":
        pool.share(b"x" * 300_000)
    units = [Unit(f"u{n}", "tests.core.run.light_work:where", {"number": n, "wait": 60 * n}) for n in range(2)]
    try:
        for _ in pool.run(units):
            threading.Timer(1, kill_agent).start()
    except WorkerError as error:
        sys.exit(str(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
@pytest.mark.parametrize("store", ["stored", pytest.param("empty", marks=pytest.mark.hardening)])
def test_the_death_of_the_dashboard_agent_is_named_and_how_to_go_on(tmp_path, store):
    done = run(tmp_path, AGENT, store)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "dashboard agent" in done.stderr
    assert "finished are kept: run the same command again" in done.stderr


@pytest.mark.hardening
def test_what_a_lost_machine_was_at_is_done_by_the_other(tmp_path):
    done = run(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert {name: number for name, (number, _) in result["found"].items()} == {f"u{n}": n * n for n in range(6)}
    assert result["lost"]
    # On the machine that is left alone, whose only place a worker has.
    assert result["again"] == [0, 1, 4]
