"""The soak's schemathesis: requests made from the admin API's own document, and from v1-openapi.yaml, a document of /v1 made by hand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from tests.support.daemon_process import ROOT, DaemonProcess

V1 = Path(__file__).with_name("v1-openapi.yaml")
ADMIN = "/admin/v1/openapi.json"
# An answer that never ends: one request for it takes REQUEST_S or more of the round, and says nothing.
ENDLESS = "/admin/v1/live"
REQUIREMENT = "schemathesis==4.32.*"
INSTALL = f"python3 -m venv /tmp/soak && /tmp/soak/bin/pip install '{REQUIREMENT}', then --schemathesis /tmp/soak/bin/st"
REQUEST_S, END_S = 10, 120
# Hub names that a document's examples make up are looked for nowhere.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}


def program() -> str | None:
    """schemathesis' own, beside this Python or on PATH."""
    return shutil.which("st", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def command_of(st: str, url: str, document: str, seconds: float) -> list[str]:
    """url: the daemon's; the others are those of `call`."""
    left_out = ["--exclude-path", ENDLESS] if document == ADMIN else []
    return [
        st, "run", url + document if document == ADMIN else document, "--url", url, *left_out, "--checks", "soak", "--continue-on-failure",
        "--max-time", str(max(1, round(seconds))), "--request-timeout", str(REQUEST_S), "--max-redirects", "0",
        "--header", "x-sparkd-client:soak", "--warnings", "off", "--suppress-health-check", "all", "--generation-database", "none",
        "--no-color", "--output-truncate", "true",
    ]  # fmt: skip


def call(made: DaemonProcess, st: str, document: str, seconds: float) -> tuple[int, list[str]]:
    """(answers, faults) of so many seconds. st: the program; document: ADMIN or V1's path."""
    tally = made.folder / "tally.json"
    tally.unlink(missing_ok=True)
    command = command_of(st, made.url, document, seconds)
    hooks = {"SCHEMATHESIS_HOOKS": "tests.bench.soak_checks", "SPARKD_SOAK_TALLY": str(tally), "PYTHONPATH": str(ROOT)}
    with (made.folder / "schemathesis.log").open("wb") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=made.folder, env=os.environ | hooks, **streams)
        try:
            code = process.wait(seconds + END_S)
        finally:
            process.kill()
            process.wait()
    if not tally.exists():
        raise RuntimeError(f"schemathesis ended with {code}: {(made.folder / 'schemathesis.log').read_text(errors='replace')[-2000:]}")
    seen = json.loads(tally.read_text())
    faults = list(seen["faults"])
    if code not in (0, 1):
        faults.append(f"schemathesis ended with {code}: {(made.folder / 'schemathesis.log').read_text(errors='replace')[-500:]}")
    print(f"  {Path(document).name}: answers by status {json.dumps(seen['statuses'], sort_keys=True)}", flush=True)
    return sum(seen["statuses"].values()), faults


def forget_added(made: DaemonProcess) -> None:
    """The models that requests have added go again; the one of the file is READY."""
    for model in (made.get("/admin/v1/models") or {}).get("models", []):
        if model["origin"] == "api":
            made.client.request("DELETE", f"/admin/v1/models/{quote(model['name'], safe='')}")
    made.load("m")
    made.wait_for("m", "READY", 120)
