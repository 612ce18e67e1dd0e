"""How vLLM is told of a folder: arguments of ``vllm.LLM``, and the same for its server."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import ArtifactError
from freemoe.core.files import MANIFEST
from freemoe.core.untrusted import read_json
from freemoe.domain_experts.result import KIND as EXPERTS
from freemoe.hookmoe.artefact_files import KIND as TRIMMED
from freemoe.hookmoe.artefact_files import read_config
from freemoe.recipes.expert_names import BASE
from freemoe.tomoe.result import KIND as CONVERTED

METHOD = "freemoe"
"""Name of our quantization method."""

FOLDER = "experts"
"""Where our entry of the config has the artefact's folder."""

CONVERTIBLE = {
    "tomoe_llama": "Llama",
    "tomoe_mistral": "Mistral",
    "tomoe_qwen2": "Qwen2",
    "tomoe_qwen3": "Qwen3",
    "tomoe_gemma": "Gemma",
}
"""Model type of a converted model that vLLM can serve -> how its family is called in our classes; of Phi vLLM has no class."""

TRIMMABLE = {"mixtral": "Mixtral", "olmoe": "Olmoe", "qwen3_moe": "Qwen3Moe"}
"""Family of a trimmed mixture that vLLM can serve -> how it is called in our classes."""

TRIMMED_FOLDER = "freemoe_trimmed"
"""Where a trimmed mixture's folder stands in the config of its base."""

_ROOM = "freemoe.serve.vllm"
WORKER = f"{_ROOM}.worker.ExpertWorker"
SCHEDULER = f"{_ROOM}.scheduler.ExpertScheduler"
CHECK = f"{_ROOM}.requests:ExpertCheck"
NAMES = f"{_ROOM}.model_names.ModelNames"


def expert_names(artefact: str | Path) -> list[str]:
    """The experts of an artefact, as its manifest names them."""
    manifest = read_manifest(artefact)
    if manifest.get("kind") != EXPERTS:
        raise ArtifactError(
            f"{str(artefact)!r} holds {manifest.get('kind')!r}, and experts per request are served of {EXPERTS!r}. Give the "
            "folder that freemoe build wrote."
        )
    return [one["name"] for one in manifest.get("experts", [])]


def llm_arguments(folder: str | Path, base: str | Path | None = None) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for what a command of freemoe wrote: ``LLM(**llm_arguments(folder))``.

    Of domain experts a request names one by ``SamplingParams(extra_args={"expert": NAME})``; without one, or with ``base``, it is the
    base's.

    Args:
        folder: What ``freemoe build``, ``convert`` or ``trim`` wrote; or a plain model, a folder or a name of the hub.
        base: Folder of the base; what the artefact names if absent.

    Raises:
        ArtifactError: The artefact is damaged, of a kind or a family that vLLM cannot be told of, or a whole model is to be put on a
            base.
    """
    kind = _artefact_kind(folder)
    if kind in (None, CONVERTED):
        if base is not None:
            raise ArtifactError(f"{str(folder)!r} is a whole model, which is put on no base. Leave the base out.")
        if kind is None:
            return {"model": str(folder)}
        read_manifest(folder)
        model_type = read_json(Path(folder) / "config.json").get("model_type")
        if model_type not in CONVERTIBLE:
            raise ArtifactError(
                f"{str(folder)!r} is of the model_type {model_type!r}, and vLLM can serve {', '.join(CONVERTIBLE)}. Serve it with "
                "freemoe's own engine."
            )
        return {"model": str(folder), "enforce_eager": True}
    manifest = read_manifest(folder)
    named = str(base or manifest.get("base_model_name_or_path"))
    if kind == TRIMMED:
        family = read_config(Path(folder), manifest)["family"]
        if family not in TRIMMABLE:
            raise ArtifactError(
                f"{str(folder)!r} is a trimmed mixture of the family {family!r}, and vLLM can serve {', '.join(TRIMMABLE)}. Serve it "
                "with freemoe's own engine."
            )
        own = {"architectures": [f"Trimmed{TRIMMABLE[family]}ForCausalLM"], TRIMMED_FOLDER: str(Path(folder).resolve())}
        return {"model": named, "hf_overrides": own, "enforce_eager": True}
    expert_names(folder)
    own = {"quant_method": METHOD, FOLDER: str(Path(folder).resolve())}
    return {
        "model": named,
        "hf_overrides": {"quantization_config": own},
        "worker_cls": WORKER,
        "scheduler_cls": SCHEDULER,
        "logits_processors": [CHECK],
        "async_scheduling": False,
        "enforce_eager": True,
    }


def served_names(folder: str | Path) -> list[str]:
    """What a request can name as its model, by the names that freemoe's own server has; of a trimmed mixture not its base."""
    kind = _artefact_kind(folder)
    if kind is None:
        return [BASE]
    if kind == TRIMMED:
        return [f"{BASE}:trimmed"]
    return [BASE, *(f"{BASE}:{name}" for name in ([CONVERTED] if kind == CONVERTED else expert_names(folder)))]


def serve_command(
    folder: str | Path, base: str | Path | None = None, more: Sequence[str] = (), python: str = sys.executable
) -> list[str]:
    """The command that starts vLLM's OpenAI server, whose models are `served_names`.

    ``more``: options of vLLM's server, as on its command line; the last of two that disagree counts.
    """
    given = llm_arguments(folder, base) | {"served_model_name": served_names(folder), "host": "127.0.0.1"}
    if "worker_cls" in given:
        given["middleware"] = NAMES
    # "vllm serve" looks for a distribution called vllm, and the CPU's is called otherwise.
    found = [python, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else "--no-" + flag.removeprefix("--"))
        elif isinstance(value, list):
            found += [flag, *value]
        else:
            found += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return [*found, *more]


def _artefact_kind(folder: str | Path) -> str | None:
    """The kind of an artefact; None of a plain model."""
    if not (Path(folder) / MANIFEST).is_file():
        if Path(folder).is_dir() and not (Path(folder) / "config.json").is_file():
            raise ArtifactError(
                f"{str(folder)!r} is neither an artefact nor a model: it has no {MANIFEST} and no config.json. Give what freemoe "
                "build, convert or trim wrote, or the folder of a model."
            )
        return None
    return str(read_manifest(folder, check=False).get("kind"))
