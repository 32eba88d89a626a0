"""What this machine says of itself, and how a program is started on it."""
