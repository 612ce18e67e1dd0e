"""Learned gates: what is trained, from where it starts, and how it becomes hard."""
