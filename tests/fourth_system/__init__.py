"""A toy system, as somebody would add it: it makes the last layer's MLP weaker by a factor."""
