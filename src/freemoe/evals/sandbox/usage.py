"""What a process and everything that it has started use together, as the kernel tells it from outside."""

from __future__ import annotations

import os


def count_machine_tasks() -> int:
    """Processes and threads on this machine now; 0 where it does not say."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            return int(file.read().split()[3].split("/")[1])
    except (OSError, ValueError, IndexError):
        return 0


def descendant_processes(first: int) -> dict[int, int]:
    """All processes below one, and those of its session, whoever their parent is now -> threads; none without ``/proc``."""
    children: dict[int, list[int]] = {}
    threads: dict[int, int] = {}
    in_session: list[int] = []
    try:
        names = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return {}
    for process in names:
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        threads[process] = int(fields[17])
        children.setdefault(int(fields[1]), []).append(process)
        if int(fields[3]) == first and process != first:
            in_session.append(process)
    reached = [first]
    for process in reached:
        reached += children.get(process, [])
    return {process: threads[process] for process in [*reached[1:], *in_session] if process in threads}


def memory_in_use(processes: list[int]) -> int:
    """Bytes that processes hold together, each page once.

    Anonymous pages count by the share that each process has in them. What can be shared counts as far as it is mapped, once
    for all: pages of it live on when nobody's page table shows them. A process that cannot be looked into counts with all
    that is resident.
    """
    total, shared = 0, {}
    for process in processes:
        try:
            with open(f"/proc/{process}/smaps_rollup", encoding="ascii") as file:
                total += sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss_Anon:"))
            with open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as file:
                for line in file:
                    area, rights, offset, device, number = line.split(maxsplit=5)[:5]
                    if rights[1:4:2] == "ws":
                        start, end = (int(part, 16) for part in area.split("-"))
                        size, place = int(offset, 16) + end - start, (device, number)
                        shared[place] = max(size, shared.get(place, 0))
        except (OSError, ValueError):
            total += _resident_bytes(process)
    return total + sum(shared.values())


def _resident_bytes(process: int) -> int:
    try:
        with open(f"/proc/{process}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def num_files(process: int, folder: str) -> int:
    """Files and folders of the file system that a process sees at a path; 0 where that cannot be seen."""
    try:
        about = os.statvfs(f"/proc/{process}/root{folder}")
    except OSError:
        return 0
    return about.f_files - about.f_ffree
