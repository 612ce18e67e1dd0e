"""How a model family is laid out, as rows of data; its weights, and the one owner of hooks."""
