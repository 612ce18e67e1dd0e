"""What `FreeMoE` is made of: experts on a base, combinations of them, batches of several experts, summaries."""
