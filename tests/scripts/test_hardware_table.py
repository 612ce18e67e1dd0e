"""The table of docs/hardware.md is what the arithmetic says today."""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import hardware_table  # noqa: E402


def test_the_page_has_what_is_computed():
    page = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    assert "\n".join(hardware_table.table()) in page, (
        "run python -m scripts.hardware_table, and write its table into the page"
    )


def test_stand_ins_have_as_many_parameters_as_the_models():
    # As their cards count them.
    counts = {"Llama-3.2-1B": 1.24e9, "Llama-3.2-3B": 3.21e9, "Llama-3.1-8B": 8.03e9, "OLMoE-1B-7B": 6.92e9}
    for name, expected in counts.items():
        model = hardware_table.stand_in(*hardware_table.SHAPES[name])
        assert abs(sum(p.numel() for p in model.parameters()) / expected - 1) < 0.005
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
