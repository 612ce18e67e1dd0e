"""Domain experts (Free-MoE / MoDE): switch off the weights that hurt a domain, route each prompt to its expert."""
