"""Reads from a configured model's own files what its entry needs: commit, parsers, tasks and runtime."""
