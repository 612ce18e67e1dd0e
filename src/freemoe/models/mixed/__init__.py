"""Sequences of one batch that act under different experts, in one forward pass; the weights stay the base's."""
