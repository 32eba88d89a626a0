"""The typed keys of sparkd.yaml and of a model's entry."""
