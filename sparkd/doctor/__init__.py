"""Finds on this machine what would keep models from being served well, and how to fix it."""
