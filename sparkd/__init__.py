"""sparkd, the control plane: turns DGX Sparks into one dependable OpenAI-compatible endpoint. Never imports torch or vllm."""

__version__ = "0.1.0"
