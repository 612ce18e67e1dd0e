"""What answers: requests in, tokens out, one thread that owns the base."""
