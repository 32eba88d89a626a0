"""Clients that are generated from the admin API's document, used once against a running daemon with the stub engine. Run by hand:

    python -m tests.compat.generated_clients

It fetches openapi-python-client and openapi-spec-validator (pip) and openapi-typescript (npm, where that is installed) into a scratch
folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.daemon_process import DaemonProcess

TIMEOUT_S = 600.0
PYTHON_TOOLS = ("openapi-python-client", "openapi-spec-validator", "ruff")
SCRIPT_TOOLS = ("openapi-typescript", "openapi-fetch", "typescript@5")

# The steps of a program with a generated client: read, add, change, load, wait, read a log, be refused, remove.
USE_PYTHON = """
import importlib
import pkgutil
import sys

from sparkd_admin_api_client import AuthenticatedClient, models
from sparkd_admin_api_client.api import default

calls = {name: importlib.import_module(f"{default.__name__}.{name}") for _, name, _ in pkgutil.iter_modules(default.__path__)}

def call(called, /, **arguments):
    return calls[called].sync_detailed(client=client, **arguments)

client = AuthenticatedClient(base_url=sys.argv[1], token="admin-key-0123456789", raise_on_unexpected_status=False, timeout=60)
folder = sys.argv[2]
status = call("status").parsed
assert isinstance(status, models.Status) and status.settled, status
assert [model.name for model in call("models").parsed.models] == ["quick"]

new = models.NewModel.from_dict({"name": "org/new", "spec": {"model": folder, "memory_gib": 1}, "load": False})
assert call("add", body=new).parsed.model.origin == "api"
changed = models.ChangedModel.from_dict({"spec": {"model": folder, "memory_gib": 1, "ttl": 600}})
assert call("change", name="org/new", body=changed).parsed.model.name == "org/new"
other = models.NewModel.from_dict({"name": "org/new", "spec": {"model": folder}})
refused = call("add", body=other)
assert refused.status_code == 409, refused
assert b"request_id" in refused.content

begun = call("load", name="org/new").parsed
assert isinstance(begun, models.Accepted), begun
ended = call("operation", operation_id=begun.operation, wait_s=120).parsed
assert ended.state.value == "SUCCEEDED", ended
model = call("model", name="org/new").parsed
assert model.state.value == "READY" and model.ranks[0].node == model.node, model
page = call("log", name="org/new")
assert page.status_code == 200 and page.parsed.text, page
events = call("events", limit=1000).parsed.events
assert {"added", "changed", "ready"} <= {event.kind for event in events}
assert call("nodes").parsed.hardware.memory_bytes > 0
assert call("memory").parsed.readings[0].node
for name in ("fabric", "doctor", "incidents", "operations", "recipes", "plan"):
    answer = call(name)
    assert answer.status_code == 200 and answer.parsed is not None, (name, answer)
assert call("remove", name="org/new").parsed.kind == "unload"
print(f"{len(calls)} calls are there; the generated Python client works")
"""

USE_SCRIPT = """
import createClient from "openapi-fetch";
import type { paths } from "./api";

const client = createClient<paths>({ baseUrl: process.argv[2], headers: { authorization: "Bearer admin-key-0123456789" } });
const status = await client.GET("/admin/v1/status");
if (!status.data?.settled) throw new Error(JSON.stringify(status.error));
const model = await client.GET("/admin/v1/models/{name}", { params: { path: { name: "quick" } } });
const state: string | undefined = model.data?.state;
if (state === undefined) throw new Error(JSON.stringify(model.error));
const none = await client.GET("/admin/v1/models/{name}", { params: { path: { name: "none" } } });
if (none.error?.error.code !== "model_not_found" || !none.error.error.request_id) throw new Error(JSON.stringify(none));
// A stream of text where it is asked for.
const history = (await client.GET("/admin/v1/events")).data;
const first: string | undefined = typeof history === "object" ? history.events[0]?.kind : undefined;
console.log(`the generated TypeScript client works: ${state}, ${first}`);
"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="sparkd-clients-") as name:
        folder = Path(name)
        tools = folder / "tools"
        run([sys.executable, "-m", "venv", str(tools)], folder)
        run([str(tools / "bin" / "pip"), "install", "--quiet", *PYTHON_TOOLS], folder)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        daemon = DaemonProcess(folder, settings(folder / "model"))
        daemon.client.headers["authorization"] = "Bearer admin-key-0123456789"
        daemon.start()
        try:
            daemon.settled()
            daemon.ray_connected()
            document = daemon.get("/admin/v1/openapi.json")
            (folder / "api.json").write_text(json.dumps(document))
            run([str(tools / "bin" / "openapi-spec-validator"), "api.json"], folder)
            use_python(folder, tools, daemon.url)
            if shutil.which("npm"):
                use_script(folder, daemon.url)
            else:
                print("npm is not installed: the TypeScript client was not tried")
        finally:
            daemon.end()
    return 0


def settings(model: Path) -> dict[str, Any]:
    return {
        "keys": {"admin": ["admin-key-0123456789"]},
        "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2},
        "models": {"quick": {"model": str(model), "memory_gib": 1}},
    }


def use_python(folder: Path, tools: Path, url: str) -> None:
    generate = [str(tools / "bin" / "openapi-python-client"), "generate", "--path", "api.json", "--meta", "none", "--fail-on-warning"]
    run([*generate, "--output-path", "sparkd_admin_api_client"], folder, tools / "bin")
    (folder / "use.py").write_text(USE_PYTHON)
    run([str(tools / "bin" / "python"), "use.py", url, str(folder / "model")], folder)


def use_script(folder: Path, url: str) -> None:
    run(["npm", "init", "--yes"], folder)
    run(["npm", "install", "--silent", *SCRIPT_TOOLS], folder)
    run(["npx", "openapi-typescript", "api.json", "--output", "api.ts"], folder)
    (folder / "use.ts").write_text(USE_SCRIPT)
    (folder / "node.d.ts").write_text("declare const process: { argv: string[] };\n")
    flags = ["--strict", "--noUncheckedIndexedAccess", "--module", "esnext", "--moduleResolution", "bundler", "--target", "es2022"]
    run(["npx", "tsc", *flags, "--lib", "es2022,dom,dom.iterable", "use.ts", "node.d.ts"], folder)
    (folder / "use.js").rename(folder / "use.mjs")
    run(["node", "use.mjs", url], folder)


def run(command: list[str], folder: Path, tools: Path | None = None) -> None:
    """tools: a folder of programs that the command may start."""
    environ = os.environ | {"NO_COLOR": "1"} | ({"PATH": f"{tools}:{os.environ['PATH']}"} if tools else {})
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    print(f"{Path(command[0]).name} {' '.join(command[1:3])}: {done.stdout.strip().splitlines()[-1] if done.stdout.strip() else 'done'}")


if __name__ == "__main__":
    sys.exit(main())
