"""Two processes train as one does with the same rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from freemoe.cli.failures import STOPPED
from freemoe.tomoe.devices import DistributedContext
from freemoe.tomoe.structures import methods
from tests.cli.conftest import freemoe  # noqa: F401  (a fixture)
from tests.tiny import save_base_and_text

# Each process balances its own tokens, so that this term alone differs.
FLAGS = (
    "convert model --text text.jsonl --steps 4 --block 32 --batch-tokens 128 --experts 3 --dtype float32 --no-rivals -q "
    "--rounds 0 --set losses.balance=0 --set train.save_every=2 --device cpu --threads 1 -o"
)
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "commands.py"]
# One command after the other: to start two processes takes longer than either.
COMMANDS = """
import sys
from freemoe.cli import _run_arguments
for output in sys.argv[1:]:
    if code := _run_arguments([*{flags!r}, output]):
        sys.exit(code)
"""


def by_two_processes(*outputs):
    Path("commands.py").write_text(COMMANDS.format(flags=FLAGS.split()))
    command = [sys.executable, *LAUNCHER, *outputs]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [Path(output) for output in outputs]


def columns_but_balance(result):
    balance = result["history"]["columns"].index("balance")
    return torch.tensor([row[:balance] + row[balance + 1 :] for row in result["history"]["rows"]])


@pytest.mark.slow
def test_two_processes_are_one(
    freemoe,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    save_base_and_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert freemoe(*FLAGS.split(), "alone").code == 0
    # Stopped at an evaluation, both go on from the state that was kept before it.
    score = methods._score_candidate

    def stopping(context, trainer, *more):
        if trainer.step == 2:
            raise KeyboardInterrupt
        return score(context, trainer, *more)

    monkeypatch.setattr(methods, "_score_candidate", stopping)
    assert freemoe(*FLAGS.split(), "resumed").code == STOPPED
    alone, (both, resumed) = Path("alone"), by_two_processes("both", "resumed")
    a, b = load_file(alone / "structure.safetensors"), load_file(both / "structure.safetensors")
    assert sorted(a) == sorted(b)
    for name, tensor in a.items():
        torch.testing.assert_close(tensor.float(), b[name].float(), atol=1e-3, rtol=1e-3, msg=name)
    results = [json.loads((folder / "result.json").read_text()) for folder in (alone, both, resumed)]
    for result in results[1:]:
        torch.testing.assert_close(columns_but_balance(result), columns_but_balance(results[0]), atol=1e-5, rtol=1e-4)
    curves = [[point["perplexity"] for point in x["held_out_curve"]] for x in results]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert curves[0][0] != curves[0][-1], "training changed nothing, so that nothing was compared"


def test_without_a_launcher_there_is_one():
    assert DistributedContext.from_environment() == DistributedContext(0, 1)
    tensor = torch.ones(3)
    DistributedContext().all_reduce_mean([tensor])
    assert torch.equal(tensor, torch.ones(3))
    assert DistributedContext().broadcast_number(7) == 7
