"""The configuration: its values, its checks, its API keys."""
