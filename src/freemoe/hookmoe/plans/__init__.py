"""How many experts each layer runs: plans, the searches for them, and how one is put on a model."""
