"""Serving: `settings` say what is asked for, `served` resolves and opens it, `http.server`, `ray.launch` or `vllm.launch` serve it."""
