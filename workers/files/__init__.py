"""A model's files on their way from node to node: the manifest, the serving node, the fetching node."""
