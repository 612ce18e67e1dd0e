"""ToMoE: its tables and figures."""
