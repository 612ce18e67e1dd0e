"""Structured purification: whole units (neurons, KV groups, layers, experts) are off, and can be cut out."""
