"""What the installed vLLM itself says of flags and of models: asked of a child, checked and kept."""
