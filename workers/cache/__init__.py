"""The cache of quantized weights on disk."""
