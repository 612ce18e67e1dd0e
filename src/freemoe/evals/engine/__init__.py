"""Answers of a model: likelihoods, generation, and what is computed once for many requests."""
