"""Tasks of lm-eval (the evaluation harness): benchmarks of our table, and any other task by its name."""
