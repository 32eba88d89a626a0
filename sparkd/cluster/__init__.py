"""The nodes: Ray, the agents there, where a model is placed and how its ranks are started."""
