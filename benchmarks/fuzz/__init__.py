"""`python -m benchmarks fuzz`: hostile recipes, flags, task files, artefacts, base models and results, and what becomes of them."""
