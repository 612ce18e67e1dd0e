"""MoDE and Free-MoE: their tables and figures."""
