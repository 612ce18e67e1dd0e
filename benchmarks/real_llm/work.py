"""One cell measured, in a process of its own: so that its time and its memory are its own."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from benchmarks.real_llm.cells import BASE, EVERYTHING
from benchmarks.real_llm.data import MATERIALS, TEXTS, Material, load_parts, parts_of
from benchmarks.real_llm.methods import mixtures
from benchmarks.real_llm.methods.null import null_builds
from benchmarks.real_llm.methods.papers import banded, gated
from benchmarks.real_llm.methods.routing import routed
from benchmarks.real_llm.methods.structured import METHODS
from benchmarks.real_llm.methods.weights import Stand, joined, per_document, with_adapter
from benchmarks.real_llm.protocol import Job
from benchmarks.rivals.rival import Fitted
from freemoe.core.errors import DataError
from freemoe.core.files import write_atomic
from freemoe.core.memory import peak_memory_bytes
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.hooks import forward_pre_hook
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights

_PREFILL, _DECODE, _TIMED = 512, 16, 3


def open_stand(job: Job, materials: Mapping[str, Material] = MATERIALS) -> Stand:
    """Load the base of a cell and part its material.

    Raises:
        DataError: The base has no tokenizer, or files are not there.
    """
    model, tokenizer = load_base(job.model, dtype="float32", device="cpu")
    if tokenizer is None:
        raise DataError(f"The base {job.model!r} has no tokenizer, and documents are text.")
    protocol = replace(job.protocol, reference=job.cell.documents or job.protocol.reference)
    # The base on everything has no material of its own.
    material = materials[TEXTS[0].name if job.cell.material == EVERYTHING else job.cell.material]
    data = parts_of(material, material.load(Path(job.root), tokenizer, protocol), protocol, job.cell.seed)
    return Stand(job.cell, protocol, model, tokenizer, find_weights(model), data)


def record_of(stand: Stand, fitted: Fitted) -> dict[str, Any]:
    """Scores on reported documents of the model as a method leaves it, and what every record says of a method."""
    if fitted.model is not None:
        stand.use(fitted.model)
    data = stand.data
    return {
        "kind": data.kind,
        "ids": [d.id for d in data.reported],
        "keys": [d.key for d in data.reported],
        **per_document(data.kind, stand.scores(fitted.prompted(data.reported))),
        "losses": list(fitted.losses),
        "numbers": fitted.numbers,
        "bytes": fitted.bytes,
        "share_off": fitted.share_off,
        "documents": {"gradient": len(data.gradient), "stop": len(data.stop)},
        "formats": {"train": stand.protocol.train, "score": stand.protocol.score, "weights": "float32"},
        "threads": torch.get_num_threads(),
        "notes": list(data.notes),
    }


_OWN_WAYS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "null": null_builds,
    "route": routed,
    "convert": mixtures.converted,
    "mixture": mixtures.split,
    "trim": mixtures.trimmed,
    "bands": lambda job: banded(open_stand(job)),
    "gates": gated,
}


def measure_cell(job: Job) -> dict[str, Any]:
    """Measure a cell in its family's own way, of a method, or of kept experts on other documents; returns its record."""
    began, cell = time.perf_counter(), job.cell
    if cell.family in _OWN_WAYS:
        return _OWN_WAYS[cell.family](job)
    stand = open_stand(job)
    if cell.family == "text":
        stand.found = {k: v for _, path in job.needs for k, v in load_file(path).items()}
    facts = {"load_seconds": time.perf_counter() - began, "loaded_memory_bytes": peak_memory_bytes()}
    if cell.family in ("cross", "union"):
        return {**facts, "notes": stand.data.notes, **_elsewhere(job, stand)}
    tokens = Counter[bool]()

    def count(module: Any, arguments: tuple[Any, ...]) -> None:
        tokens[torch.is_grad_enabled()] += arguments[0].numel()

    with ExitStack() as stack:
        with forward_pre_hook(stand.model.get_input_embeddings(), count):
            began = time.perf_counter()
            fitted = stack.enter_context(METHODS.get(cell.method)(stand))
            seconds, memory = time.perf_counter() - began, peak_memory_bytes()
        path = Path(job.tensors)
        if fitted.tensors:
            write_atomic(path, save({k: v.contiguous() for k, v in fitted.tensors.items()}))
        else:
            path.unlink(missing_ok=True)  # an older record's
        began = time.perf_counter()
        record = record_of(stand, fitted)
        # The base is known on every reference document, so that any seed's split finds its pairs.
        whole = [*stand.data.gradient, *stand.data.stop, *stand.data.guard]
        held = whole if cell.method == BASE else stand.data.guard
        guard = stand.scores(held) if held else []
        record |= {
            "guard": {"ids": [d.id for d in held], "keys": [d.key for d in held], "values": [s.value for s in guard]},
            **fitted.facts,
        }
        if "speed" not in record:
            record["speed"] = speed(stand)
    return {
        **facts,
        **record,
        "seconds": seconds,
        "score_seconds": time.perf_counter() - began,
        "memory_bytes": memory,
        "tokens_trained": tokens[True],
        "tokens_looked_at": tokens[False],
    }


@torch.no_grad()
def speed(stand: Stand) -> dict[str, float]:
    """Tokens per second of the model as it stands, as a plain checkpoint in the scoring format.

    Reading a prompt of 512 tokens, and writing 16 more one by one; medians of three.
    """
    model, number_format = stand.model, getattr(torch, stand.protocol.score)
    if number_format != torch.float32:
        # A copy with weights in that format: casting them anew for every token is no part of a checkpoint's speed.
        model = copy.deepcopy(model).to(number_format)
    length = min(_PREFILL, stand.scorer.max_length - _DECODE - 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, stand.model.config.vocab_size, (1, length), generator=generator)
    read, written = [], []
    for _ in range(_TIMED):
        began = time.perf_counter()
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        read.append(length / (time.perf_counter() - began))
        began = time.perf_counter()
        for _ in range(_DECODE):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        written.append(_DECODE / (time.perf_counter() - began))
    return {"prefill": sorted(read)[_TIMED // 2], "decode": sorted(written)[_TIMED // 2], "prompt": length}


# ---------------------------------------------------------------------------------------- elsewhere


def _elsewhere(job: Job, stand: Stand) -> dict[str, Any]:
    """Kept experts on documents of other materials: one on all others (the base on all), or two at once on both of theirs."""
    own = job.cell.material
    if job.cell.family == "union":
        columns = [own, job.cell.other]
    else:
        columns = [m for m in MATERIALS if m not in (own, "tinystories")]
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        if job.cell.method == "lora":
            ((cell, path),) = job.needs
            with_adapter(stand, load_file(path), cell.rank)
        elif job.needs:
            kept = [load_file(path) for _, path in job.needs if Path(path).exists()]
            stack.enter_context(switched_off(stand.weights, joined(stand.weights, kept)))
        for column in columns:
            data = load_parts(column, Path(job.root), stand.tokenizer, job.protocol, 0)
            documents = data.reported
            if job.cell.family != "union":
                documents = documents[:: max(1, len(documents) // job.protocol.crossed)]
            scores = per_document(data.kind, stand.scores(documents, data.graders))
            ids, keys = [d.id for d in documents], [d.key for d in documents]
            found[column] = {"kind": data.kind, "ids": ids, "keys": keys, **scores}
    return {"columns": found, "memory_bytes": peak_memory_bytes()}
