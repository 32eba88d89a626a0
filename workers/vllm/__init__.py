"""Every use of vLLM: the loader, the worker that sizes the cache, questions about a model. The rest of workers runs without vLLM."""
