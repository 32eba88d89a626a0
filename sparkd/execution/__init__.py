"""How work runs beside the event loop: bounded, shared, and with one boundary for its errors."""
