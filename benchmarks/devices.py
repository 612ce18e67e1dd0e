"""The device that a benchmark runs on: waiting for it, and the memory that is held there."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from freemoe.core.memory import free_now, peak_memory_bytes, reset_peak_memory, used_memory_bytes


def wait() -> None:
    """Until every accelerator has done what this process asked of it; a kernel is only queued when its call returns."""
    if torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)


def is_accelerator(device: str) -> bool:
    """Whether a device is another than the CPU."""
    return torch.device(device).type != "cpu"


def dtype_on(device: str) -> torch.dtype:
    """What models are held in there: bfloat16 on an accelerator, whose matrix units are made for it, float32 on a CPU."""
    return torch.bfloat16 if is_accelerator(device) else torch.float32


def used_bytes(device: str) -> int:
    """Memory that this process holds now: tensors on an accelerator, everything on a CPU."""
    free_now()
    if not is_accelerator(device):
        return used_memory_bytes()
    wait()
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: str) -> int:
    """The most of it since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if is_accelerator(device) else peak_memory_bytes()


def reset_peak(device: str) -> None:
    """Let `peak_bytes` count from now on; what the allocator of an accelerator keeps unused goes back first."""
    if is_accelerator(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak_memory()


def weighed(device: str, work: Callable[[], Any]) -> tuple[Any, int, float]:
    """What some work returns, the most memory that it holds above what was held before it, and its seconds."""
    before = used_bytes(device)
    reset_peak(device)
    began = time.perf_counter()
    found = work()
    wait()
    seconds = time.perf_counter() - began
    return found, peak_bytes(device) - before, seconds


def about(device: str) -> dict[str, Any]:
    """A device for the record: its name, memory and driver, and the version of the compiler of its kernels."""
    if not is_accelerator(device):
        return {"name": device}
    found = torch.cuda.get_device_properties(device)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        driver = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout
    return {
        "name": found.name,
        "bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": driver.strip().partition("\n")[0],
    }
