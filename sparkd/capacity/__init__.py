"""Whether a model fits, and what it takes: weights, KV cache, activations, and the plan that says so."""
