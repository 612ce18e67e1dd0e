"""The largest values of recipes' fields: far above what anyone needs, and far below what ends a machine."""

from __future__ import annotations

TOKENS = 2**24  # Of a batch, a block or a chunk
STEPS = 10_000_000  # Of a training, or between two looks at it
DOCUMENTS = 100_000_000  # Documents or blocks
LAYERS = 10_000  # Of a model
RATE = 10.0  # Of learning
WEIGHT = 1e6  # Of a loss
CHARACTERS = 4096  # Of a text in a recipe: a path, a name
BANDS = 10_000  # Of a grid
SUBDOMAINS = 10_000  # Of a domain
NAME = 64  # Characters of a domain's name, which stands in names of units and tensors
