"""Signed purification: which weights hurt, by gradients; greedy rounds and learned switches."""
