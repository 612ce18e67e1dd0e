"""HookMoE: its tables and figures."""
