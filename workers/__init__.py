"""The programs that run on the nodes beside or inside vLLM. Never imports sparkd, except sparkd.checkpoint and sparkd.errors."""
