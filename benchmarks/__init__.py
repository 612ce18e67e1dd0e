"""Benchmarks, one file per target: each prints the ratio that its target is about, and the machine it ran on."""
