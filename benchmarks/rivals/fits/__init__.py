"""What fits a rival: one function per way, each a block behind which the model is bit-equal again."""
