"""The files of a trimmed mixture's folder, and its kind; nothing here loads torch."""

from __future__ import annotations

KIND = "trimmed-moe"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
