"""What stands between a generated program and the machine, one wall in one room each, and the bounds of all of them."""

KEEP_FILES = ("namespaces", "bubblewrap", "landlock")
"""Walls that keep a program from the user's files, of which one must stand: a filter of system calls knows no paths."""

DISK = 64 << 20
"""Bytes that a program may have in its private folder."""
SHARED = 16 << 20
"""Bytes of shared memory of a program's own processes, where it has a ``/dev/shm`` of its own."""
FILES = 1024
"""Files and folders in the private folder."""
FILE_SIZE = 4 << 20
"""Bytes of one file."""
PROCESSES = 64
"""Processes and threads."""
OPEN_FILES = 64
