"""`python -m benchmarks real`: a real LLM purified, tuned and prompted on the same documents, cell by cell."""
