"""Bases and plain checkpoints from folders, GGUF files and the hub, and back."""
