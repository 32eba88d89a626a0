"""What the loader knows of vLLM's classes."""
