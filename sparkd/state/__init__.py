"""The nouns of the control plane, and how they are stored."""
