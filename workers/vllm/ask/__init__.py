"""Questions to vLLM about a model or a flag, in children of the engine's own Python."""
