"""Many experts on one copy of the weights, through the interfaces that people already use."""
