"""Everything in the loader that depends on vLLM's classes."""
