"""Which expert answers a prompt: subdomains and the two-level router."""
