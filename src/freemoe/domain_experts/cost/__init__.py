"""What a build takes, before it is run: time, work and memory."""
