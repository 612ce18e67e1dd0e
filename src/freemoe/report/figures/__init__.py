"""Pictures of a result, each a function of the result."""
