"""How vLLM is told of an artefact: arguments of ``vllm.LLM``, and the same for its server."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freemoe.core.artifacts import entry, read_manifest
from freemoe.core.errors import ArtifactError
from freemoe.results.build import KIND

BASE = "base"
"""Name of the untouched base, as a model and as an expert."""

METHOD = "freemoe"
"""Name of our quantization method."""

FOLDER = "experts"
"""Where our entry of the config has the artefact's folder."""

_ROOM = "freemoe.serve.vllm"
WORKER = f"{_ROOM}.worker.ExpertWorker"
SCHEDULER = f"{_ROOM}.scheduler.ExpertScheduler"
CHECK = f"{_ROOM}.requests:ExpertCheck"
NAMES = f"{_ROOM}.model_names.ModelNames"


def expert_names(artefact: str | Path) -> list[str]:
    """The experts of an artefact, as its manifest names them.

    Raises:
        ArtifactError: The folder is no artefact, damaged, or holds another kind.
    """
    manifest = read_manifest(artefact)
    if manifest.get("kind") != KIND:
        raise ArtifactError(
            f"{str(artefact)!r} holds {manifest.get('kind')!r}, and experts per request are served of {KIND!r}. Give the "
            "folder that freemoe build wrote."
        )
    return [str(one["name"]) for one in entry(manifest, "experts", list, artefact)]


def llm_arguments(artefact: str | Path, base: str | Path | None = None) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` with which its requests may name an expert: ``LLM(**llm_arguments(artefact))``.

    A request names it by ``SamplingParams(extra_args={"expert": NAME})``; without one, or with ``base``, it is the base's.

    Args:
        artefact: Folder that ``freemoe build`` wrote.
        base: Folder of the base; what the artefact names if absent.

    Raises:
        ArtifactError: The folder is no artefact, damaged, or holds another kind.
    """
    expert_names(artefact)
    named = str(base or read_manifest(artefact, check=False)["base_model_name_or_path"])
    own = {"quant_method": METHOD, FOLDER: str(Path(artefact).resolve())}
    return {
        "model": named,
        "hf_overrides": {"quantization_config": own},
        "worker_cls": WORKER,
        "scheduler_cls": SCHEDULER,
        "logits_processors": [CHECK],
        "async_scheduling": False,
        "enforce_eager": True,
    }


def serve_command(artefact: str | Path, base: str | Path | None = None, more: Sequence[str] = ()) -> list[str]:
    """The command that starts vLLM's OpenAI server, whose models are ``base`` and ``base:NAME`` for every expert.

    Args:
        artefact: Folder that ``freemoe build`` wrote.
        base: Folder of the base; what the artefact names if absent.
        more: More options of vLLM's server, as on its command line; the last of two that disagree counts.

    Raises:
        ArtifactError: The folder is no artefact, damaged, or holds another kind.
    """
    served = [BASE, *(f"{BASE}:{name}" for name in expert_names(artefact))]
    given = llm_arguments(artefact, base) | {"served_model_name": served, "middleware": NAMES, "host": "127.0.0.1"}
    # "vllm serve" looks for a distribution called vllm, and the CPU's is called otherwise.
    found = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else "--no-" + flag.removeprefix("--"))
        elif isinstance(value, list):
            found += [flag, *value]
        else:
            found += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return [*found, *more]
