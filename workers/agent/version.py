"""Which agent this code has: a leaf, so that who compares it need not import the agent."""

# Raised with every change of what an agent does, so that a daemon replaces an agent of an older release. Its ranks live on.
VERSION = "25"
