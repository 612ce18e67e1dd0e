"""Products of tokens that act under different experts with one matrix: what an expert has off is taken out again."""
