"""Work for several threads that torch does not spread by itself: numpy's sorts and comparisons, sparse additions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def on_threads(work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Do the work for every item, on as many threads as torch uses.

    The first error is raised when all work that had begun is done.
    """
    threads = min(torch.get_num_threads(), len(items))
    if threads <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, items))
