"""The real LLM of 135M parameters, dequantised from its GGUF file: all of it is found, and it speaks."""

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch

from freemoe.models.checkpoints.gguf_header import read_header
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.weights import find_weights

pytestmark = [pytest.mark.realmodel, pytest.mark.slow]
SCRIPT = Path(__file__).parents[3] / "scripts" / "real_model.py"


def test_the_script_finds_it_without_importing_it(real_model_path, capsys, monkeypatch):
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.strip() == str(real_model_path)
    assert read_header(real_model_path).stored_as == "Q4_1"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="make real"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_it_is_loaded_whole_and_speaks(real_model_path):
    model, tokenizer = load_base(real_model_path, device="cpu")
    weights = find_weights(model)
    assert len(weights) == 210
    assert sum(w.size for w in weights) == 106_168_320
    assert tokenizer.chat_template
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        nats = float(model(out, labels=out).loss)
    assert "Paris" in tokenizer.decode(out[0])
    # Fluent text, where a wrong layout of queries and keys gives about 10.
    assert nats < 3
