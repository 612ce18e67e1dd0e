"""ToMoE: a dense model becomes a token-level mixture of experts whose weights are the dense model's own, frozen."""
