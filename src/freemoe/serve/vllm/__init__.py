"""A plugin for vLLM: domain experts per request on one copy of a base; converted models and trimmed mixtures."""

PYTHON = "FREEMOE_VLLM_PYTHON"
"""Environment variable: the python of the environment in which vLLM lives."""
