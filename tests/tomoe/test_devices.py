"""Two processes train as one does with the same rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from freemoe.tomoe.devices import DistributedContext
from tests.tiny import save_base_and_text

# Each process balances its own tokens, so that this term alone differs.
FLAGS = (
    "--steps 4 --block 32 --batch-tokens 128 --experts 3 --dtype float32 --no-rivals -q --set losses.balance=0 "
    "--set train.save_every=2 --device cpu --threads 1"
)
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
KILLED = 3
# Runs the command, and dies at the look after two steps, once the state of these is kept.
KILLING = f"""
import os, sys
from freemoe.cli import main
from freemoe.tomoe.structures import methods
real = methods._score_candidate
methods._score_candidate = lambda context, trainer, *more: os._exit({KILLED}) if trainer.step == 2 else real(context, trainer, *more)
sys.argv = sys.argv[1:]
main()
"""


def convert(folder: Path, output: str, launcher: list[str], ends: int = 0) -> Path:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        *launcher,
        "freemoe",
        "convert",
        "model",
        "--text",
        "text.jsonl",
        *FLAGS.split(),
        "-o",
        output,
    ]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == ends, done.stderr[-2000:]
    return folder / output


def columns_but_balance(result: dict[str, Any]) -> torch.Tensor:
    balance = result["history"]["columns"].index("balance")
    return torch.tensor([row[:balance] + row[balance + 1 :] for row in result["history"]["rows"]])


def test_two_processes_are_one(tmp_path: Path) -> None:
    save_base_and_text(tmp_path)
    alone = convert(tmp_path, "alone", ["-m"])
    both = convert(tmp_path, "both", TWO)
    a, b = load_file(alone / "structure.safetensors"), load_file(both / "structure.safetensors")
    assert sorted(a) == sorted(b)
    for name, tensor in a.items():
        torch.testing.assert_close(tensor.float(), b[name].float(), atol=1e-3, rtol=1e-3, msg=name)
    results = [json.loads((folder / "result.json").read_text()) for folder in (alone, both)]
    torch.testing.assert_close(*(columns_but_balance(r) for r in results), atol=1e-5, rtol=1e-4)
    curves = [[point["perplexity"] for point in x["held_out_curve"]] for x in results]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert curves[0][0] != curves[0][-1], "training changed nothing, so that nothing was compared"

    # Killed in a look, both go on from the state that was kept before it.
    convert(tmp_path, "resumed", ["-c", KILLING], ends=KILLED)
    resumed = json.loads((convert(tmp_path, "resumed", TWO) / "result.json").read_text())
    torch.testing.assert_close(columns_but_balance(resumed), columns_but_balance(results[0]), atol=1e-5, rtol=1e-4)


def test_without_a_launcher_there_is_one() -> None:
    assert DistributedContext.from_environment() == DistributedContext(0, 1)
    tensor = torch.ones(3)
    DistributedContext().all_reduce_mean([tensor])
    assert torch.equal(tensor, torch.ones(3))
    assert DistributedContext().broadcast_number(7) == 7
