"""Programs and guards that run in the engine's own Python."""
