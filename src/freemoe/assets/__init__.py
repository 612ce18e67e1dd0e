"""The bundled tiny models, their benchmark and their text, as files of the package; no torch is loaded here."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

BUNDLED = "freemoe-demo"
"""The name that stands for the bundled tiny model, so that an artefact of the demo loads on any machine."""

BUNDLED_MOE = "freemoe-demo-moe"  # The same for the bundled tiny mixture of experts

DOMAINS = ("math", "code", "general")
SPLITS = ("reference", "test")


def demo_model_path() -> Path:
    """Folder of the bundled model: `transformers.AutoModelForCausalLM.from_pretrained` reads it as it is.

    Raises:
        FileNotFoundError: the installation carries no model (`scripts/make_demo_model.py` writes it).
    """
    return _require_asset("demo_model", "scripts/make_demo_model.py")


def demo_moe_path() -> Path:
    """Folder of the bundled mixture of experts, to be read like `demo_model_path`'s.

    Raises:
        FileNotFoundError: the installation carries no mixture (`scripts/make_demo_moe.py` writes it).
    """
    return _require_asset("demo_moe", "scripts/make_demo_moe.py")


def benchmark_path(domain: str, split: str) -> Path:
    """JSONL file of one domain ("math", "code", "general") and split ("reference", "test") of the benchmark.

    Raises:
        ValueError: `domain` or `split` is not one of those named above.
        FileNotFoundError: the installation carries no benchmark.
    """
    for name, value, allowed in (("domain", domain, DOMAINS), ("split", split, SPLITS)):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not part of the bundled benchmark; allowed: {', '.join(allowed)}")
    return _require_asset(f"benchmark/{domain}.{split}.jsonl", "scripts/make_demo_benchmark.py")


def demo_documents() -> list[str]:
    """16,000 documents of the world that the bundled models were trained on, drawn anew.

    Raises:
        FileNotFoundError: the installation carries no text (`scripts/make_demo_benchmark.py` writes it).
    """
    path = _require_asset("benchmark/documents.jsonl", "scripts/make_demo_benchmark.py")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _require_asset(name: str, script: str) -> Path:
    path = Path(str(resources.files(__name__))) / name
    if not path.exists():
        raise FileNotFoundError(f"the bundled asset {path} is missing; {script} writes it")
    return path
