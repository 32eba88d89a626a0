"""A model's files on their way from node to node: what is there, who serves it, who fetches it. Never talks to a hub."""
