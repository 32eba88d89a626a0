"""HTTP to one engine: connections, addresses, metrics."""
