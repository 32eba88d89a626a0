"""Recipes and entries from elsewhere: their files, library and registries, what they expand to, and what they may bring."""
