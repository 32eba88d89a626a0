"""The web page: its files, and how they are served. Knows nothing of models or nodes."""
