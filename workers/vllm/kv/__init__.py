"""Sizes the KV cache inside vLLM's worker. The arithmetic is workers.kv's."""
