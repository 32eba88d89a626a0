"""Owns what is asked of vLLM about a model or a flag, in children of the engine's own Python."""
