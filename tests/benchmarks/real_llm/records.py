"""Made-up records of cells, as `Store` would read them."""

from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.real_llm.cells import Cell
from freemoe.core.errors import NumericError

BASE = Cell("text", "wikitext")
LORA = replace(BASE, method="lora", rank=1, rate=1e-3)
LEARNED = replace(BASE, method="learned", budget=0.01)
NLL = [40.0, 30.0, 20.0, 50.0] * 100


def text_record(cell, nll, losses=None, **more):
    """A record of text: four documents or so, ten tokens each, a guard with the same numbers."""
    ids = [f"reported:{i}" for i in range(len(nll))]
    guard = {"ids": ids, "keys": ids, "values": [-v / 10 for v in nll]}
    return _record(cell, losses, kind="text", ids=ids, keys=ids, nll=nll, tokens=[10] * len(nll), guard=guard) | more


def made_up(job):
    """What measures a cell in a process of its own: keeps a file, but finds NaN where switches are learned."""
    if job.cell.method == "learned":
        raise NumericError("a loss is NaN")
    Path(job.tensors).write_bytes(f"found by {job.cell.family}".encode())
    return text_record(job.cell, [1.0, 2.0, 3.0], [2.0])


def task_record(cell, right, losses=None, **more):
    """A record of questions, the guard with the same answers."""
    ids = [f"test:{i}" for i in range(len(right))]
    guard = {"ids": ids, "keys": ids, "values": right}
    return _record(cell, losses, kind="task", ids=ids, keys=ids, right=right, guard=guard) | more


def null_record(number, *accepted):
    """A record of a batch of null builds."""
    cell, builds = Cell("null", f"batch{number}"), [{"accepted": a, "p": 0.01 if a else 0.5} for a in accepted]
    return {"cell": vars(cell), "name": cell.name, "builds": builds, "what": "w", "reference": 120}


def _record(cell, losses, **entries):
    return {
        "cell": asdict(cell),
        "name": cell.name,
        "identity": "x",
        "losses": losses or [],
        "numbers": 1,
        "bytes": 2,
        "share_off": cell.budget,
        "seconds": 1.0,
        "memory_bytes": 10**6,
        "tokens_trained": 5,
        "wall_seconds": 2.0,
        "speed": {"prefill": 100.0, "decode": 10.0},
        **entries,
    }


def finished(*records):
    """Records by their cells' names."""
    return {r["name"]: r for r in records}
