"""Whether a model fits, and its memory: weights, KV cache, activations, and the plan that shows them."""
