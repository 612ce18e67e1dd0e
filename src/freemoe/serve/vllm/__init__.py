"""A plugin for vLLM: domain experts per request on one copy of a base."""
