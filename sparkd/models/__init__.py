"""What a model is and where it lies: its source, its shape, its files on the hub."""
