"""The data plane: bounded HTTP, keys, routes, the byte-for-byte pass-through to the engines, and their metrics."""
