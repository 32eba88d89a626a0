"""The memory guard of a node: samples, policy, and the end of an engine."""
