"""What a configured model's own files say of its entry: its commit, its parsers, its tasks, its runtime."""
