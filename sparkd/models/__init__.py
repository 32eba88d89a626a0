"""A model's source, its shape and its files on the hub."""
