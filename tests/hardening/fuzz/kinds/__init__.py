"""What is fuzzed, one file per kind: how its cases are drawn, what opens them, and what may be accepted."""
