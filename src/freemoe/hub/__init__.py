"""The Hugging Face Hub: reading from it, writing to it, and what its model cards say."""
