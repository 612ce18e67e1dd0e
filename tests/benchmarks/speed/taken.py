"""What a process of its own says of a block that it takes and gives back."""

import torch

from freemoe.core.memory import free_now, peak_memory_bytes, reset_peak_memory, used_memory_bytes


def weigh(_name):
    """Bytes while the block is held, after it is freed, and at most."""
    free_now()
    before = used_memory_bytes()
    reset_peak_memory()
    held = torch.ones(8 << 20)
    taken = used_memory_bytes() - before
    del held
    return [taken, used_memory_bytes() - before, peak_memory_bytes() - before]
