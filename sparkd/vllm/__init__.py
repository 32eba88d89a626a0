"""Knowledge of vLLM without importing it: flags, releases and parsers."""
