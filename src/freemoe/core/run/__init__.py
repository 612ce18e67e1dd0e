"""A run: where it reports, what it has finished, the folder it writes, and the steps that every system's run has."""
