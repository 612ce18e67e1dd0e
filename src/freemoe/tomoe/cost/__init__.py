"""What a conversion takes, before it is made: tokens, memory, time."""
