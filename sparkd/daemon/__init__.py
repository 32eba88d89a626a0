"""The daemon as a process: what it is composed of, its reload, its logs and its console."""
