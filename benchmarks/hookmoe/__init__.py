"""Benchmarks of leaner mixtures."""
