"""One rank of an engine: its specification, its command, its life and its reports."""
