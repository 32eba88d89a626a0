"""The quantized weights that are kept on disk."""
