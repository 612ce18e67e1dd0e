"""Peak memory of a conversion by arithmetic, from shapes alone: so also for bases and devices that are not there.

The factors were fitted on Llama shapes in fp32; `tests/tomoe/cost/test_memory.py` holds the sum against a run that is weighed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freemoe.evals.engine.output_head import CHUNK
from freemoe.models.sublayers import DecoderSublayers
from freemoe.tomoe.gates.hypernetwork import EMBEDDING
from freemoe.tomoe.gates.initialise import CLUSTERED_TOKENS
from freemoe.tomoe.recipe import ConvertRecipe

# What autograd keeps of a layer, as a part of the inputs and outputs of its linears.
_KEPT = 1.1
# Made again, a layer's activations stand beside what their gradients need.
_AGAIN = 1.6
# Numbers of a logit in fp32 that a chunk of tokens holds at once: of both models, their difference and its gradient.
_LOGITS = 4
# Of a trained number: itself, its gradient, Adam's two moments; the mean, and a copy of all but the gradient while a state
# is written.
_TRAINED, _MEAN, _WRITTEN = 16, 4, 16


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a conversion's parts."""

    base: int  # The dense model
    activations: int  # Of one training step, most of what stands between its forward and its backward pass
    logits: int  # Of a chunk of tokens, beyond what is made again when they are gone
    optimizer: int  # What is trained, its gradients, moments and mean
    clustering: int  # Inputs of every MLP, of which experts begin as clusters
    timed: int  # The converted model, at most, where it is timed beside the base

    @property
    def peak_bytes(self) -> int:
        """The largest moment, beside the libraries: a step, the clustering before the first one, or the timing at the end."""
        return self.base + max(self.activations + self.logits + self.optimizer, self.clustering, self.timed)


def estimate_memory(
    recipe: ConvertRecipe,
    sublayers: Sequence[DecoderSublayers],
    base_bytes: int,
    vocabulary: int,
    block: int,
    trained: int,
) -> MemoryEstimate:
    """Count the bytes of a conversion.

    From the base's bytes, its head's vocabulary, the tokens of a block of text, and how many numbers are trained.
    """
    each = sublayers[0].q.weight.element_size()
    tokens = max(block, recipe.train.batch_tokens // block * block)
    layers = []
    for layer in sublayers:
        # In fp32 what a token's router and value gate keep.
        gates = 4 * (6 * EMBEDDING + 5 * recipe.experts + 6 * layer.rotary.head_dim + layer.hidden_size)
        layers.append(tokens * (_KEPT * each * _activation_size(layer) + gates))
    hidden = tokens * each * sublayers[0].hidden_size
    # Made again in the backward pass, one layer's are held beside every layer's input.
    kept, again = (len(layers) * hidden, _AGAIN * max(layers)) if recipe.train.checkpointing else (sum(layers), 0.0)
    # Where masks meet, products of one MLP's width stand in fp32.
    masks = 3 * 4 * tokens * max(layer.intermediate_size for layer in sublayers)
    chunk = min(tokens, max(1, CHUNK // vocabulary))
    mean = _MEAN if recipe.train.mean_window else 0
    clustered = max(block, CLUSTERED_TOKENS)
    return MemoryEstimate(
        base=base_bytes,
        activations=round(kept + again + 2 * hidden + masks),
        logits=round(max(0.0, _LOGITS * 4 * chunk * vocabulary - again)),
        optimizer=(_TRAINED + mean + _WRITTEN) * trained,
        clustering=4 * clustered * sublayers[0].hidden_size * len(layers)
        + tokens * each * _activation_size(sublayers[0]),
        timed=base_bytes if recipe.timing.rounds else 0,
    )


def _activation_size(layer: DecoderSublayers) -> int:
    """Numbers that a token brings into a layer's linears and takes out of them."""
    linears = (layer.q, layer.k, layer.v, layer.o, *layer.up, layer.down)
    return sum(linear.in_features + linear.out_features for linear in linears)
