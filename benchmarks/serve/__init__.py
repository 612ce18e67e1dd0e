"""Several experts at once: in one batch, behind one server."""
