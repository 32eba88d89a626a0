"""The parts of the loader that depend on vLLM's classes."""
