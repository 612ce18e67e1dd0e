"""Units of work on a Ray cluster. Nothing here knows what the units do."""
