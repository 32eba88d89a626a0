"""The fixes that `sparkd doctor --fix` may make on this node: settings in files of their own, and how each is undone.

Nothing here stops a process, touches a model's files or needs a restart; what would is a cure in words.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkd.errors import StateError
from workers.host.interpreter import inherited_environment

TIMEOUT_S = 30.0
SYSCTL_FILE = "etc/sysctl.d/60-sparkd-{name}.conf"


@dataclass(frozen=True, slots=True)
class Fix:
    """
    path: the file to make, below the root, empty where none is; it is never made over another.
    commands: argv, run in this order.
    undo: what a person types to have it as before.
    """

    check: str
    what: str
    path: str
    text: str
    commands: tuple[tuple[str, ...], ...]
    undo: str


def fixes_of(findings: Iterable[Mapping[str, Any]], raw: Mapping[str, Any]) -> list[Fix]:
    """The fixes of this node's findings that are safe: what was read before, in `raw`, is what undoing goes back to."""
    files = raw.get("files") or {}
    checks = {finding["check"] for finding in findings if finding["verdict"] != "ok" or finding["cure"]}
    fixes = []
    for check, key, value in (("swappiness", "swappiness", "10"), ("dirty", "dirty_bytes", str(256 << 20))):
        if check in checks:
            fixes.append(_sysctl(check, key, value, files))
    if "page-cache" in checks and any(path.endswith("sparkd-dropcache.socket") for path in raw.get("paths", ())):
        start = (("systemctl", "enable", "--now", "sparkd-dropcache.socket"),)
        undo = "systemctl disable --now sparkd-dropcache.socket"
        fixes.append(Fix("page-cache", "start the helper that drops the page cache", "", "", start, undo))
    if "operator" in checks:
        path = "etc/systemd/system/user.slice.d/60-sparkd.conf"
        text = "[Slice]\nMemoryMin=4G\nMemoryLow=6G\n"
        again = (("systemctl", "daemon-reload"),)
        fixes.append(Fix("operator", "keep 4 GiB for user sessions", path, text, again, f"rm /{path} && systemctl daemon-reload"))
    return fixes


def apply(fix: Fix, root: Path) -> None:
    """Raises StateError, with what failed, and leaves nothing behind then. Below a root other than / only the file is made."""
    path = root / fix.path
    try:
        if fix.path:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            with path.open("x", encoding="ascii") as file:
                file.write(fix.text)
    except OSError as error:
        reason = "it exists already, made by another program" if isinstance(error, FileExistsError) else error.strerror
        raise StateError(f"{path} cannot be made: {reason}. Run it as root: sudo sparkd doctor --fix.") from error
    if root != Path("/"):
        return
    for command in fix.commands:
        try:
            null, environ = subprocess.DEVNULL, inherited_environment(os.environ)
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=null, env=environ)
        except (OSError, subprocess.SubprocessError) as error:
            if fix.path:
                path.unlink(missing_ok=True)
            complaint = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise StateError(
                f"`{' '.join(command)}` failed: {complaint[-1][:200] if complaint else 'it said nothing'}. Nothing was changed."
            ) from error


def _sysctl(check: str, key: str, value: str, files: Mapping[str, str]) -> Fix:
    before = files.get(f"proc/sys/vm/{key}", "").strip()
    back = [f"vm.{key}={before}"]
    if key == "dirty_bytes" and before == "0":
        # The kernel clears the ratio when bytes are given, and bytes when the ratio is (Documentation/admin-guide/sysctl/vm.rst).
        back = [f"vm.dirty_ratio={files.get('proc/sys/vm/dirty_ratio', '20').strip()}"]
    path = SYSCTL_FILE.format(name=key.replace("_", "-"))
    line = f"vm.{key} = {value}\n"
    what = f"set vm.{key} to {value} (now {before}), after a restart too"
    return Fix(check, what, path, line, (("sysctl", "-q", f"vm.{key}={value}"),), f"rm /{path} && sysctl {' '.join(back)}")
