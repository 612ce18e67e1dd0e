"""Fast versions of what the methods compute, each beside a readable reference that it equals."""
