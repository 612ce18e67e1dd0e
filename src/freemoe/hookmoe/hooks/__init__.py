"""What gives back what a plan lost: hooks, their closed form and their training."""
