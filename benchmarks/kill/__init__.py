"""`python -m benchmarks kill`: runs that are killed at every kind of write, and what becomes of them."""
