"""Where Ray's library writes its logs, which it documents for nobody."""

from __future__ import annotations


def log_folder() -> str | None:
    """The folder of this process's logs; None where the library does not run in it (``ray://``) or keeps its node elsewhere."""
    from ray._private import worker

    node = getattr(worker, "_global_node", None)
    return node and str(node.get_logs_dir_path())
