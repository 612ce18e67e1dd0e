"""`python -m benchmarks rivals`: what else fits or shrinks a model, one row each, on equal terms."""
