"""HookMoE: fewer experts per token by a plan, and small hooks that give back what the plan lost."""
