"""The Ray actor of a node, and the jobs that it runs there."""
