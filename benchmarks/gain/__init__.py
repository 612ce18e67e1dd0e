"""T7: what switched-off weights gain on held-out documents, beside LoRA and full tuning."""
