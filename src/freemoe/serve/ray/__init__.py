"""The server as replicas behind one address, by Ray Serve."""
