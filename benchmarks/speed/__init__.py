"""Benchmarks of time and size: both sides in one process, in turns."""
