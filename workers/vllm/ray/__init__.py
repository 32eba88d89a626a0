"""An engine on vLLM's Ray executor, in its own processes."""
