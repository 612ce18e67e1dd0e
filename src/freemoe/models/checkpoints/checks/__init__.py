"""What a base must be before anything is built on it: whole, of sound numbers, in files that say how they are read."""
