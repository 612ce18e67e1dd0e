"""What is asked: named benchmarks, a user's files, plain text; documents and their two splits."""
