"""sparkd's units under a real systemd: what survives a restart, what the sandboxes allow. Run by `make -C deploy boot-check`, as root.

systemd runs as process 1 of namespaces of its own (boot.sh); the machine's own is not touched. The page cache helper is real: the machine's
page cache is dropped once. Not collected by a plain pytest run, because it needs root and a cgroup2 mount. BOOT_ROOT=/folder boots the
root file system in that folder instead of this machine's: passed with systemd 252 (Debian 12) and 257 (Debian 13).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import HUNG_S, until

HERE = Path(__file__).resolve().parent
STUB = "/opt/sparkd/bin/sparkd"
RANK = "/run/sparkd/rank.sock"
DROPCACHE = "/run/sparkd-dropcache.sock"
RAY = "sparkd-ray.service"
DAEMON = "sparkd.service"


class Machine:
    """The inner machine. init: its process 1, as seen from outside."""

    def __init__(self, init: int) -> None:
        self.init = init

    def run(self, *command: str, check: bool = True, user: str | None = None) -> str:
        enter = ["nsenter", "-t", str(self.init), "-m", "-p", "-n", "-i", "-u", "-C", "-r", "-w"]
        become = ["setpriv", f"--reuid={user}", "--clear-groups"] if user else []
        environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
        done = subprocess.run([*enter, *become, *command], capture_output=True, text=True, timeout=HUNG_S, env=environ, check=False)
        if check and done.returncode:
            raise AssertionError(f"{command} exited {done.returncode}: {done.stdout}{done.stderr}\n{self.journal()}")
        return done.stdout.strip()

    def journal(self) -> str:
        return self.run("journalctl", "--no-pager", "-o", "cat", "-n", "60", check=False)

    def ask(self, where: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.run(STUB, "ask", where))
        return facts

    def show(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "-P", name, unit)

    def drop_in(self, unit: str, text: str) -> None:
        folder = f"/run/systemd/system/{unit}.d"
        self.run("sh", "-c", f'mkdir -p {folder} && printf "%s\\n" "$1" >{folder}/test.conf && systemctl daemon-reload', "sh", text)

    def undo(self, unit: str) -> None:
        self.run("sh", "-c", f"rm -rf /run/systemd/system/{unit}.d; systemctl daemon-reload")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if os.geteuid() != 0:
        raise RuntimeError("The boot test needs root for namespaces and cgroups: sudo make -C deploy boot-check")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    cgroup = Path(next(mount[1] for mount in mounts if mount[2] == "cgroup2"), f"sparkd-boot-{os.getpid()}")
    scratch = tmp_path_factory.mktemp("boot")
    with subprocess.Popen([str(HERE / "boot.sh"), str(scratch), str(cgroup)], stdin=subprocess.DEVNULL) as boot:
        found: list[int] = []
        try:

            def started() -> bool:
                if boot.poll() is not None:
                    raise RuntimeError(f"boot.sh ended with {boot.returncode}")
                scope = cgroup / "init.scope/cgroup.procs"
                found[:] = [int(line) for line in scope.read_text().split()] if scope.exists() else []
                return bool(found)

            until(started)
            inner = Machine(found[0])
            until(lambda: inner.run("systemctl", "is-system-running", check=False) in ("running", "degraded"))
            inner.run("systemctl", "start", "sparkd.socket", DAEMON)
            yield inner
        finally:
            if found:
                os.kill(found[0], signal.SIGKILL)
            else:
                boot.kill()
            boot.wait()
            for folder in sorted((path for path in cgroup.rglob("*") if path.is_dir()), reverse=True):
                folder.rmdir()
            cgroup.rmdir()


def test_both_units_are_up_and_say_what_they_do(machine: Machine) -> None:
    assert machine.show(DAEMON, "StatusText") == "serving"
    assert machine.show(RAY, "StatusText") == "ray is up"
    facts = machine.ask("4000")
    assert facts["listener"] == ["127.0.0.1", 4000]
    assert facts["watchdog_s"] == 30
    # A key that is not there is no key, and no reason not to start.
    assert facts["credentials"] == {"admin.key": "sk-admin-of-the-boot-test", "inference.key": None, "ray.token": None}


def test_what_the_sandboxes_leave(machine: Machine) -> None:
    daemon, rank = machine.ask("4000"), machine.ask(RANK)
    ours = ["/tmp", "/dev/shm", "/run/sparkd", "/var/log/sparkd", "/var/lib/sparkd"]
    assert daemon["writable"] == ours
    assert rank["writable"] == ours
    assert not {"kmsg", "mem", "fuse", "nvidia0"} & set(daemon["devices"])
    assert rank["notify"] is None


def test_an_engine_cannot_reach_the_keys_by_proc(machine: Machine) -> None:
    """Both units run as one user. Without the capability that only the daemon's unit has, the rank reads them."""
    assert machine.ask("4000")["credentials"]["admin.key"]
    assert machine.ask(RANK)["keys"] == []
    machine.drop_in(DAEMON, "[Service]\nAmbientCapabilities=")
    machine.run("systemctl", "restart", DAEMON)
    machine.ask("4000")
    assert machine.ask(RANK)["keys"]
    machine.undo(DAEMON)
    machine.run("systemctl", "restart", DAEMON)
    machine.ask("4000")
    assert machine.ask(RANK)["keys"] == []


def test_the_services_user_cannot_keep_the_units_from_starting_by_a_link(machine: Machine) -> None:
    """In every folder that systemd makes or binds for the units, as the user whose they are."""
    folders = ("/var/lib/sparkd", "/var/lib/sparkd/tmp", "/var/lib/sparkd-tmp", "/run/sparkd", "/var/log/sparkd")
    for folder in folders:
        plant = f"mv {folder} {folder}.before; rmdir {folder}; ln -s /etc {folder}; ln -s /etc {folder}/tmp; true"
        machine.run("sh", "-c", plant, user="sparkd")
    for unit in (RAY, DAEMON):
        machine.run("systemctl", "restart", unit)
    assert [machine.show(unit, "ActiveState") for unit in (RAY, DAEMON)] == ["active", "active"]
    assert machine.ask(RANK)["tmp_is_kept"]


def test_daemon_reads_what_adoption_needs(machine: Machine) -> None:
    """ProtectProc=invisible hides other users' processes; PrivateUsers= would hide the ranks too (another user namespace)."""
    assert machine.ask("4000")["sees_rank"]


def test_a_rank_survives_a_restart_of_both_units(machine: Machine) -> None:
    rank, daemon, node = machine.ask(RANK), machine.ask("4000"), machine.show(RAY, "MainPID")
    machine.run("systemctl", "restart", RAY, DAEMON)
    after = machine.ask(RANK)
    assert after["pid"] == rank["pid"]
    assert after["tmp_is_kept"]
    assert f"/system.slice/{RAY}" in after["cgroup"]
    assert machine.ask("4000")["pid"] != daemon["pid"]
    assert machine.show(RAY, "MainPID") != node


def test_a_rank_survives_stop_and_start(machine: Machine) -> None:
    rank = machine.ask(RANK)
    machine.run("systemctl", "stop", "sparkd.socket", DAEMON, RAY)
    assert machine.ask(RANK)["pid"] == rank["pid"]
    machine.run("systemctl", "start", "sparkd.socket", DAEMON)
    assert machine.ask(RANK)["pid"] == rank["pid"]
    assert machine.ask("4000")["sees_rank"]


def test_a_rank_survives_the_death_of_both(machine: Machine) -> None:
    rank, daemon = machine.ask(RANK), machine.ask("4000")
    machine.run("systemctl", "kill", "--kill-who=main", "-s", "KILL", DAEMON, RAY)
    # Nothing is refused meanwhile: the connection waits in the socket unit's backlog.
    assert machine.ask("4000")["pid"] != daemon["pid"]
    until(lambda: machine.show(RAY, "ActiveState") == "active")
    assert machine.ask(RANK)["pid"] == rank["pid"]


def test_a_reload_keeps_the_process(machine: Machine) -> None:
    daemon = machine.ask("4000")
    machine.run("systemctl", "reload", DAEMON)
    until(lambda: machine.show(DAEMON, "StatusText") == "reloaded 1")
    assert machine.ask("4000")["pid"] == daemon["pid"]
    assert machine.show(DAEMON, "ActiveState") == "active"


def test_a_hung_daemon_is_replaced(machine: Machine) -> None:
    rank = machine.ask(RANK)
    machine.drop_in(DAEMON, "[Service]\nWatchdogSec=1")
    machine.run("systemctl", "restart", DAEMON)
    daemon = machine.ask("4000")
    machine.run("touch", "/var/lib/sparkd/hang")
    until(lambda: machine.show(DAEMON, "MainPID") not in ("0", str(daemon["pid"])))
    machine.run("rm", "/var/lib/sparkd/hang")
    machine.undo(DAEMON)
    machine.run("systemctl", "restart", DAEMON)
    assert machine.ask(RANK)["pid"] == rank["pid"]
    assert "watchdog" in machine.journal().lower()


def test_a_mended_configuration_comes_up_by_itself(machine: Machine) -> None:
    """Neither unit gives up, however often the daemon ends itself at once, and a client that connects meanwhile is answered in the end."""
    machine.run("touch", "/var/lib/sparkd/bad-config")
    machine.run("systemctl", "restart", DAEMON, check=False)
    enter = ["nsenter", "-t", str(machine.init), "-m", "-p", "-n", "-r", "-w", STUB, "ask", "4000"]
    with subprocess.Popen(enter, stdout=subprocess.PIPE, text=True) as client:
        until(lambda: int(machine.show(DAEMON, "NRestarts")) >= 5)
        assert machine.show("sparkd.socket", "ActiveState") == "active"
        machine.run("rm", "/var/lib/sparkd/bad-config")
        output, _ = client.communicate()
    assert json.loads(output)["listener"] == ["127.0.0.1", 4000]
    assert machine.show(DAEMON, "ActiveState") == "active"


def test_the_page_cache_helper(machine: Machine) -> None:
    first = machine.run(STUB, "ask", DROPCACHE).split()
    assert first[0] == "ok"
    assert all(number.isdigit() for number in first[1:3])
    assert machine.run(STUB, "ask", DROPCACHE).split()[0] == "limited"
    assert machine.run("stat", "-c", "%U %G %a", DROPCACHE) == "root sparkd 660"
    assert machine.run(STUB, "ask", DROPCACHE, check=False, user="nobody") == ""


def test_the_page_cache_helper_can_write_nothing_else(machine: Machine) -> None:
    unit = "sparkd-dropcache@.service"
    machine.drop_in(unit, f"[Service]\nExecStart=\nExecStart={STUB} probe")
    found = json.loads(machine.run(STUB, "ask", DROPCACHE))
    machine.undo(unit)
    assert found["uid"] == 0
    assert {name for name, result in found["files"].items() if result == "open"} == {"/proc/sys/vm/drop_caches"}


def test_a_client_that_keeps_knocking_closes_the_door(machine: Machine) -> None:
    knock = f"for i in $(seq 60); do {STUB} ask {DROPCACHE} & done; wait"
    machine.run("sh", "-c", knock, check=False)
    until(lambda: machine.show("sparkd-dropcache.socket", "Result") == "trigger-limit-hit")
    assert machine.show("sparkd-dropcache.socket", "ActiveState") == "failed"

    def opened_again() -> bool:
        """systemd counts on over a restart: until the interval is over the door falls shut again."""
        machine.run("sh", "-c", "systemctl reset-failed sparkd-dropcache.socket; systemctl restart sparkd-dropcache.socket")
        return machine.run(STUB, "ask", DROPCACHE, check=False).split()[:1] in (["ok"], ["limited"])

    until(opened_again)
    loaded = machine.run("systemctl", "list-units", "--all", "--no-legend", "sparkd-dropcache@*")
    assert "failed" not in loaded
