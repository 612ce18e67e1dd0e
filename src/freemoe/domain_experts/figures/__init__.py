"""The figures of a build's report."""
