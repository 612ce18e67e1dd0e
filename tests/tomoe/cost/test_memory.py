"""A conversion's memory: its arithmetic against a training that is weighed in a process of its own; how it grows."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from freemoe.models.sublayers import find_sublayers
from freemoe.recipes import recipe_from
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.cost.memory import MemoryEstimate, estimate_memory
from freemoe.tomoe.gates.hypernetwork import Hypernetwork
from freemoe.tomoe.gates.initialise import LayerImportance
from freemoe.tomoe.gates.train import GateTrainer
from freemoe.tomoe.material import checkpoint_activations
from freemoe.tomoe.recipe import ConvertRecipe

AGREES = 0.25
BLOCK, TOKENS = 512, 2048
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 2000}


def recipe(**train):
    values = {"steps": 2, "batch_tokens": TOKENS, "block": BLOCK, **train}
    found = recipe_from({"command": "convert", "model": "x", "text": ["x"], "experts": 8, "train": values})
    assert isinstance(found, ConvertRecipe)
    return found


def base(**shape):
    config = LlamaConfig(**{**SHAPE, **shape}, num_attention_heads=8, num_key_value_heads=4)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def said(model, own, block=BLOCK):
    sublayers = find_sublayers(model)
    trained = sum(p.numel() for p in Hypernetwork(sublayers, own).parameters() if p.requires_grad)
    return estimate_memory(own, sublayers, 0, model.config.vocab_size, block, trained)


def trained(model, own):
    """Two steps, and the state that is kept after them."""
    ids = torch.randint(3, model.config.vocab_size, (8, BLOCK))
    sublayers = find_sublayers(model)
    if own.train.checkpointing:
        checkpoint_activations(model)
    trainer = GateTrainer(model, sublayers, own, PackedBlocks(ids, torch.arange(BLOCK).expand_as(ids)))
    g = torch.Generator().manual_seed(0)
    trainer.start_from_statistics(
        [
            LayerImportance(
                torch.randn(8, layer.hidden_size, generator=g),
                torch.zeros(8),
                *(
                    torch.rand(n, generator=g)
                    for n in (layer.rotary.num_bits, layer.rotary.head_dim, layer.rotary.head_dim)
                ),
                mlp=torch.rand(8, layer.intermediate_size, generator=g),
            )
            for layer in sublayers
        ]
    )
    trainer.train_until(2)
    trainer.to_state()


def weigh():
    """Bytes that a training takes above its base, without checkpointing and with; in a process that a smaller one has warmed up."""
    from freemoe.core.memory import free_now, keep_memory_low, peak_memory_bytes, reset_peak_memory, used_memory_bytes

    keep_memory_low()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trained(base(hidden_size=64, intermediate_size=128, num_hidden_layers=1), recipe(batch_tokens=BLOCK))
    found = []
    for checkpointing in (False, True):
        model = base()
        free_now()
        before = used_memory_bytes()
        reset_peak_memory()
        trained(model, recipe(checkpointing=checkpointing))
        found.append(peak_memory_bytes() - before)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are weighed by /proc")
def test_the_arithmetic_is_what_a_training_weighs():
    code = "import json; from tests.tomoe.cost.test_memory import weigh; print(json.dumps(weigh()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for checkpointing, found in zip((False, True), json.loads(done.stdout.splitlines()[-1]), strict=True):
        own = said(base(), recipe(checkpointing=checkpointing))
        assert found == pytest.approx(own.activations + own.logits + own.optimizer, rel=AGREES), checkpointing


def test_more_tokens_layers_and_words_take_more_and_checkpointing_less():
    plain, model = said(base(), recipe()), base()
    assert said(model, recipe(checkpointing=True)).activations < 0.6 * plain.activations
    assert said(model, recipe(batch_tokens=2 * TOKENS)).activations == pytest.approx(2 * plain.activations)
    assert said(base(num_hidden_layers=8), recipe()).activations > 1.7 * plain.activations
    assert said(base(vocab_size=4000), recipe()).logits == 2 * plain.logits
    assert said(model, recipe(mean_window=0.0)).optimizer < plain.optimizer
    # A block is never cut, however few tokens a step shall have.
    assert said(model, recipe(batch_tokens=2)).activations == said(model, recipe(batch_tokens=BLOCK)).activations


def test_the_base_and_the_largest_moment_are_the_peak():
    assert MemoryEstimate(10, 5, 2, 1, 20, 0).peak_bytes == 30
    assert MemoryEstimate(10, 5, 2, 1, 3, 10).peak_bytes == 20
    assert MemoryEstimate(10, 50, 2, 1, 20, 10).peak_bytes == 63
