"""A stub engine, for tests and benches: speaks as vLLM does, computes nothing."""
