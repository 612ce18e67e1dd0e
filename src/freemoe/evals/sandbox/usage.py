"""What a process and everything that it has started use together."""

from __future__ import annotations

import contextlib
import os


def below(first: int) -> list[int]:
    """All processes below one, and those of its session, whoever their parent is now; none where there is no ``/proc``."""
    children: dict[int, list[int]] = {}
    found: list[int] = []
    try:
        names = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for process in names:
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(process)
        if int(fields[3]) == first and process != first:
            found.append(process)
    reached = [first]
    for process in reached:
        reached += children.get(process, [])
    return list(dict.fromkeys([*reached[1:], *found]))


def resident(process: int) -> int:
    """Bytes of memory that a process holds, but for files' and what is shared by name; 0 where the machine does not say."""
    try:
        with open(f"/proc/{process}/statm", "rb") as file:
            fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def held(folder: str, most: int) -> tuple[int, int]:
    """Bytes and number of the files and folders below one, however deep; counted until there are more than ``most``."""
    left, size, number = [folder], 0, 0
    while left and number <= most:
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                number += 1
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_size
                if number > most:
                    break
    return size, number
