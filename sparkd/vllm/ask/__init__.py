"""Answers of the installed vLLM about flags and models: asked in a child process, checked and kept on disk."""
