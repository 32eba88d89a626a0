"""What on this machine would keep models from being served well, and how to fix it."""
