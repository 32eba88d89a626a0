"""Owns llama-swap's and other recipes' names for keys: aliases of sparkd's keys, and keys without a meaning here. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping

# Alias -> sparkd's key; a dot leads into a section.
TOP: Mapping[str, str] = {
    "apiKeys": "keys.inference",
    "globalTTL": "global_ttl_s",
    "healthCheckTimeout": "health_check_timeout_s",
    "includeAliasesInList": "include_aliases_in_list",
    "logLevel": "log_level",
    "sendLoadingState": "send_loading_state",
    "unloadTimeout": "unload_timeout_s",
}
MODEL: Mapping[str, str] = {
    "concurrencyLimit": "concurrency_limit",
    "useModelName": "served_model_name",
    "model_revision": "revision",
    "tensor_parallel_size": "tensor_parallel",
    "distributed_executor_backend": "executor",
    "healthCheckTimeout": "health_check_timeout_s",
    "sendLoadingState": "send_loading_state",
}

_FIXED_READY = "A model is ready here when it has answered a real completion. Remove the key."
_EVICTION = "sparkd decides by memory which models run together. Remove the key."
_COMMAND = "sparkd builds the engine's command itself. Give 'model:' and, for vLLM's flags, 'extra_args:' as a list."
_MACRO = "sparkd has no macros. Use ${env.NAME}, or a YAML anchor (&name, *name)."
_LOGS = "sparkd logs to its standard output, engines to files below the state folder. Remove the key."
_METRICS = "Figures are served at /metrics and not stored. Remove the key."
_ROUTING = "sparkd does not route between models. Give one model the name as an alias."
_NODES = "Nodes join by Ray: see 'cluster:'."
_SHELL = "sparkd runs no container and no shell command. Remove the key."

# Key of another launcher without a meaning in sparkd -> the advice for a message.
TOP_FOREIGN: Mapping[str, str] = {
    "captureBuffer": _METRICS,
    "logRequests": "Prompts are never logged. Remove the key.",
    "logTimeFormat": _LOGS,
    "logToStdout": _LOGS,
    "macros": _MACRO,
    "matrix": _EVICTION,
    "metricsMaxInMemory": _METRICS,
    "nodes": _NODES,
    "peers": _NODES,
    "performance": _METRICS,
    "profiles": _ROUTING,
    "selectors": _ROUTING,
    "startPort": "Engines listen on private sockets. Remove the key.",
    "store": _METRICS,
    "tailcat": "sparkd listens on 'listen:' only. Remove the key.",
    "ui": "There is nothing to set about it. Remove the key.",
    "upstream": "Engines are reached by model name only. Remove the key.",
}
MODEL_FOREIGN: Mapping[str, str] = {
    "build_args": _SHELL,
    "checkEndpoint": _FIXED_READY,
    "cluster_only": _NODES,
    "cmd": _COMMAND,
    "cmdStop": "sparkd stops an engine by its process group. Remove the key.",
    "command": _COMMAND,
    "compat": "Remove the key.",
    "container": "sparkd starts an engine in a Python environment: name its interpreter by 'runtime:'.",
    "defaults": "Write the recipe's defaults straight into the model: max_model_len, gpu_memory_utilization, ...",
    "description": "Put it below 'metadata:'.",
    "filters": "Request bodies pass unchanged. Remove the key.",
    "host": "sparkd chooses where an engine listens. Remove the key.",
    "macros": _MACRO,
    "max_nodes": _NODES,
    "min_nodes": _NODES,
    "mods": _SHELL,
    "name": "A model's name is its key below 'models:'; a display name goes below 'metadata:'.",
    "path": "Write it as 'model:'.",
    "pipeline_parallel": "sparkd makes a pipeline where the heads cannot be split over the nodes: see 'tensor_parallel:'.",
    "port": "sparkd chooses where an engine listens. Remove the key.",
    "post_commands": _SHELL,
    "post_exec": _SHELL,
    "pre_exec": _SHELL,
    "proxy": "sparkd chooses where an engine listens. Remove the key.",
    "readiness": _FIXED_READY,
    "solo_only": _NODES,
    "timeouts": "The whole daemon has one set: see 'limits:'.",
    "unloadTimeout": "It is one value for all models: 'unload_timeout_s' at the top.",
}
