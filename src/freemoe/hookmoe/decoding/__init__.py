"""Decoding on a CPU: a mixture's layers for one token in compiled loops, where they compute what the model's own do."""
