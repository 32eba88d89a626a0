"""Which weight gets which format, decided without torch."""
