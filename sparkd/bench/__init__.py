"""Measures a model over the gateway, keeps what was measured, and compares it."""
