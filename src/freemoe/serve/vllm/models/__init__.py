"""Models of freemoe as classes of vLLM, beside its own."""
