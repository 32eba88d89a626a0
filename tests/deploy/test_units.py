"""The systemd side as it would be installed: what systemd-analyze says, what install.sh lays down, how the page cache helper answers.

What needs a running systemd stands in tests/chaos/boot.py.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.facts import facts
from tests.support.waiting import HUNG_S

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DAEMON, RAY, HELPER = "sparkd.service", "sparkd-ray.service", "sparkd-dropcache@.service"
SERVICES = (DAEMON, RAY, HELPER)
UNITS = (*SERVICES, "sparkd.socket", "sparkd-dropcache.socket")
DROP_INS = ((DAEMON, "relax"), (RAY, "relax"), (DAEMON, "systemd-255"))


def call(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )


def tool(name: str) -> str:
    path = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        pytest.fail(f"{name} is missing: install the package systemd (apt-get install systemd on Debian and Ubuntu).")
    return path


@dataclass(frozen=True, slots=True)
class Stage:
    """An installation below a temporary folder whose units name programs that exist there."""

    root: Path
    prefix: Path
    venv: Path

    def make(self, target: str) -> subprocess.CompletedProcess[str]:
        return call("make", "-C", DEPLOY, target, f"DESTDIR={self.root}", f"PREFIX={self.prefix}", f"VENV={self.venv}")

    @property
    def units(self) -> Path:
        return self.root / self.prefix.relative_to("/") / "lib/systemd/system"

    def tree(self) -> dict[str, tuple[str, bytes]]:
        """Path below the root -> (mode, content) of every file."""
        files = (path for path in sorted(self.root.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.root)): (oct(path.stat().st_mode), path.read_bytes()) for path in files}

    def verify(self, *units: str) -> subprocess.CompletedProcess[str]:
        return call(tool("systemd-analyze"), "verify", "--man=no", *units, SYSTEMD_UNIT_PATH=f"{self.units}:")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    found = Stage(tmp_path / "root", tmp_path / "prefix", tmp_path / "venv")
    done = found.make("install")
    assert done.returncode == 0, done.stderr
    # verify looks for the programs where the units will: give it the staged helper, and a stand-in for the Python environment.
    found.prefix.symlink_to(found.root / found.prefix.relative_to("/"))
    (found.venv / "bin").mkdir(parents=True)
    (found.venv / "bin/sparkd").symlink_to("/bin/true")
    return found


def directives(unit: str) -> dict[str, list[str]]:
    """Name -> values in order, of all sections."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / unit).read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_systemd_verifies_the_units_without_a_word(stage: Stage) -> None:
    done = stage.verify(*UNITS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_drop_ins_are_understood(stage: Stage) -> None:
    for unit, name in DROP_INS:
        folder = stage.units / f"{unit}.d"
        folder.mkdir(exist_ok=True)
        shutil.copy(DEPLOY / f"{unit}.d" / f"{name}.conf.example", folder / f"{name}.conf")
    complaints = stage.verify(DAEMON, RAY).stderr.splitlines()
    version = re.search(r"systemd (\d+)", call(tool("systemd-analyze"), "--version").stdout)
    assert version is not None
    if int(version[1]) < 254:
        newer = ("notify-reload", "RestartSteps", "RestartMaxDelaySec")
        complaints = [line for line in complaints if not any(word in line for word in newer)]
    assert complaints == []


def test_exposure_is_at_most_3(stage: Stage) -> None:
    for unit in SERVICES:
        done = call(tool("systemd-analyze"), "security", "--no-pager", "--offline=true", "--threshold=30", stage.units / unit)
        assert done.returncode == 0, done.stdout.splitlines()[-1:] + done.stderr.splitlines()


def user_of(stage: Stage) -> list[str]:
    """The fields of sparkd's line in passwd, once systemd-sysusers has written it."""
    users = call(tool("systemd-sysusers"), f"--root={stage.root}", stage.units.parent.parent / "sysusers.d/sparkd.conf")
    assert (users.returncode, "rror" in users.stderr) == (0, False), users.stderr
    return next(line for line in (stage.root / "etc/passwd").read_text().splitlines() if line.startswith("sparkd:")).split(":")


def make_folders(stage: Stage) -> subprocess.CompletedProcess[str]:
    rules = stage.units.parent.parent / "tmpfiles.d/sparkd.conf"
    return call(tool("systemd-tmpfiles"), f"--root={stage.root}", "--create", "--remove", "--boot", rules)


def test_the_user_and_the_folders(stage: Stage) -> None:
    assert user_of(stage)[5:] == ["/var/lib/sparkd", "/usr/sbin/nologin"]
    kept, scratch = stage.root / "var/lib/sparkd/state.db", stage.root / "var/lib/sparkd-tmp/left-over"
    for path in (kept, scratch):
        path.parent.mkdir(parents=True)
        path.touch()
    made = make_folders(stage)
    # 65 is a line that cannot be parsed (systemd-tmpfiles(8)); without root it cannot give folders away, and says so with 73.
    assert made.returncode != 65, made.stderr
    assert kept.exists()
    assert not scratch.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_modes_and_owners_of_the_folders(stage: Stage) -> None:
    user, key = user_of(stage), stage.root / "etc/sparkd/admin.key"
    key.touch(mode=0o644)
    made = make_folders(stage)
    assert made.returncode == 0, made.stderr
    modes = {"etc/sparkd": 0o750, "etc/sparkd/sparkd.yaml": 0o640, "etc/sparkd/admin.key": 0o600, "var/lib/sparkd": 0o700}
    assert {name: stat.S_IMODE((stage.root / name).stat().st_mode) for name in modes} == modes
    assert (stage.root / "var/lib/sparkd").stat().st_uid == int(user[2])
    assert key.stat().st_uid == 0


def test_installing_twice_is_installing_once_and_uninstalling_leaves_nothing(stage: Stage) -> None:
    once = stage.tree()
    assert stage.make("install").returncode == 0
    assert stage.tree() == once
    prefix = stage.prefix.relative_to("/")
    shells = ("bash-completion/completions/sparkd", "zsh/site-functions/_sparkd", "fish/vendor_completions.d/sparkd.fish")
    assert {"etc/sparkd/sparkd.yaml", *(f"{prefix}/share/{name}" for name in shells)} <= set(once)
    assert stage.make("uninstall").returncode == 0
    assert stage.tree() == {}
    assert [path for path in stage.root.rglob("sparkd*") if path.is_dir()] == []
    assert stage.make("uninstall").returncode == 0


def test_sparkd_is_on_the_path_of_root_and_ssh_and_nobody_elses_program_is_touched(stage: Stage) -> None:
    link = stage.root / stage.prefix.relative_to("/") / "bin/sparkd"
    assert link.readlink() == stage.venv / "bin/sparkd"
    assert stage.make("uninstall").returncode == 0
    assert not link.is_symlink()

    link.write_text("#!/bin/sh\n")
    assert stage.make("install").returncode == 0
    assert "is no link to" in stage.make("check").stdout
    assert stage.make("uninstall").returncode == 0
    assert link.read_text() == "#!/bin/sh\n"


def test_what_the_operator_wrote_is_kept(stage: Stage) -> None:
    config, key = stage.root / "etc/sparkd/sparkd.yaml", stage.root / "etc/sparkd/admin.key"
    config.write_text("log_level: debug\n")
    key.write_text("sk\n")
    assert stage.make("install").returncode == 0
    assert config.read_text() == "log_level: debug\n"
    assert stage.make("uninstall").returncode == 0
    assert set(stage.tree()) == {"etc/sparkd/sparkd.yaml", "etc/sparkd/admin.key"}


def test_check_names_every_problem(stage: Stage) -> None:
    staged = stage.root / stage.venv.relative_to("/") / "bin/sparkd"
    staged.parent.mkdir(parents=True)
    shutil.copy("/bin/true", staged)
    root = os.geteuid() == 0
    assert stage.make("check").returncode == (0 if root else 2)

    (stage.root / "etc/sparkd/admin.key").touch(mode=0o644)
    (stage.units / RAY).unlink()
    staged.chmod(0o777)
    done = stage.make("check")
    assert done.returncode != 0
    for problem in ("admin.key can be read by others", f"{RAY} is missing", "can be changed by somebody else than root"):
        assert problem in done.stdout


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PREFIX": "usr", "DESTDIR": "/tmp/x"}, "'usr'"),
        ({"VENV": "/opt/my venv", "DESTDIR": "/tmp/x"}, "'/opt/my venv'"),
    ],
)
def test_places_that_cannot_stand_in_a_unit_are_refused(environ: dict[str, str], expected: str) -> None:
    done = call(DEPLOY / "install.sh", "install", **environ)
    assert done.returncode == 1
    assert expected in done.stderr


def test_the_prefix_reaches_the_units(stage: Stage) -> None:
    assert f"ExecStart={stage.prefix}/libexec/sparkd-dropcache\n" in (stage.units / HELPER).read_text()
    assert f"ExecStart={stage.venv}/bin/sparkd serve --config /etc/sparkd/sparkd.yaml\n" in (stage.units / DAEMON).read_text()
    assert f"ExecStart={stage.venv}/bin/sparkd ray-node --config /etc/sparkd/sparkd.yaml\n" in (stage.units / RAY).read_text()


def test_what_lets_a_rank_live_on() -> None:
    """Each line was tried against a running systemd (deploy/README.md)."""
    ray = directives(RAY)
    assert ray["KillMode"] == ["process"]
    assert ray["OOMPolicy"] == ["continue"]
    assert ray["RuntimeDirectoryPreserve"] == ["yes"]
    assert not {"PrivateTmp", "RemoveIPC", "PrivateUsers", "PrivateDevices", "PrivateNetwork", "MemoryDenyWriteExecute"} & ray.keys()
    assert not {"PrivateTmp", "RemoveIPC", "PrivateUsers"} & directives(DAEMON).keys()


def test_the_daemon_and_ray_share_a_home() -> None:
    names = ("User", "Group", "StateDirectory", "RuntimeDirectory", "RuntimeDirectoryPreserve", "BindPaths", "UMask")
    daemon, ray = directives(DAEMON), directives(RAY)
    assert {name: daemon[name] for name in names} == {name: ray[name] for name in names}


def test_the_ray_unit_reaches_the_devices_of_cuda_and_rdma() -> None:
    """Names as /proc/devices has them; a pattern without * must be a whole name (systemd.resource-control(5))."""
    patterns = [value.split()[0].removeprefix("char-") for value in directives(RAY)["DeviceAllow"] if value.startswith("char-")]
    for group in ("nvidia", "nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidia-modeset", "infiniband_verbs", "infiniband_mad"):
        assert any(fnmatch.fnmatchcase(group, pattern) for pattern in patterns), group
    for group in ("misc", "mem", "hidraw", "rtc"):
        assert not any(fnmatch.fnmatchcase(group, pattern) for pattern in patterns), group
    assert "DeviceAllow" not in directives(DAEMON)


def test_no_secret_in_argv_or_environment() -> None:
    units = {unit: directives(unit) for unit in UNITS}
    for unit, found in units.items():
        for name in ("Environment", "EnvironmentFile", "ExecStart", "ExecReload"):
            for value in found.get(name, []):
                assert not re.search(r"key|token|secret|password", value, re.IGNORECASE), (unit, name, value)
    credentials = [(found, value) for found in units.values() for value in found.get("LoadCredential", [])]
    assert credentials
    for found, value in credentials:
        name, path = value.split(":")
        assert path == f"/etc/sparkd/{name}"
        # Empty but for a newline: what a missing file becomes. Without it the unit would not start.
        assert f"{name}:\\n" in found["SetCredential"]


def test_the_listener_is_on_loopback() -> None:
    assert directives("sparkd.socket")["ListenStream"] == ["127.0.0.1:4000"]
    assert directives(DAEMON)["Sockets"] == ["sparkd.socket"]


def test_only_sparkd_may_ask_for_the_page_cache() -> None:
    door = directives("sparkd-dropcache.socket")
    assert (door["SocketUser"], door["SocketGroup"], door["SocketMode"]) == (["root"], ["sparkd"], ["0660"])
    assert door["ListenStream"] == ["/run/sparkd-dropcache.sock"]
    assert directives(HELPER)["ReadWritePaths"] == ["/proc/sys/vm/drop_caches"]


def test_the_table_has_a_reason_for_every_directive() -> None:
    text = (DEPLOY / "README.md").read_text()
    plain = {"Description", "Wants", "After", "WantedBy", "Also", "ExecStart", "Environment"}
    names = {name for unit in SERVICES for name in directives(unit)} - plain
    assert [name for name in names if f"`{name}=" not in text] == []


# The page cache helper, with a folder for /proc.


@dataclass(frozen=True, slots=True)
class Helper:
    proc: Path
    state: Path

    def run(self, *arguments: str, said: str = "") -> tuple[int, str]:
        environ = {"DROPCACHE_PROC": str(self.proc), "DROPCACHE_STATE": str(self.state), "DROPCACHE_LOCK_WAIT_S": "0"}
        done = subprocess.run(
            [str(DEPLOY / "sparkd-dropcache"), *arguments],
            env=environ,
            input=said,
            capture_output=True,
            text=True,
            timeout=HUNG_S,
            check=False,
        )
        return done.returncode, done.stdout

    def uptime(self, seconds: float) -> None:
        (self.proc / "uptime").write_text(f"{seconds:.2f} 12345.67\n")

    @property
    def written(self) -> str:
        return (self.proc / "sys/vm/drop_caches").read_text()


@pytest.fixture
def helper(tmp_path: Path) -> Helper:
    found = Helper(tmp_path / "proc", tmp_path / "state")
    (found.proc / "sys/vm").mkdir(parents=True)
    found.state.mkdir()
    (found.proc / "meminfo").write_text("MemTotal:       125513636 kB\nMemFree:         4062344 kB\nMemAvailable:   98061308 kB\n")
    (found.proc / "sys/vm/drop_caches").touch()
    found.uptime(3.5)
    return found


def test_it_drops_and_says_what_was_free(helper: Helper) -> None:
    assert helper.run() == (0, "ok 4062344 4062344\n")
    assert helper.written == "3\n"


def test_it_hears_nothing(helper: Helper) -> None:
    assert helper.run("1; touch /tmp/x", "--help", said="error\n2\n" * 1000) == (0, "ok 4062344 4062344\n")
    assert helper.written == "3\n"


def test_it_drops_at_most_every_10_s(helper: Helper) -> None:
    times = [(100.0, "ok"), (100.9, "limited 10"), (104.2, "limited 6"), (109.9, "limited 1"), (110.0, "ok"), (110.1, "limited 10")]
    for uptime_s, expected in times:
        (helper.proc / "sys/vm/drop_caches").write_text("")
        helper.uptime(uptime_s)
        code, answer = helper.run()
        assert code == 0
        assert answer.startswith(expected), uptime_s
        assert helper.written == ("3\n" if expected == "ok" else "")


def test_one_at_a_time(helper: Helper) -> None:
    with (helper.state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, answer = helper.run()
    assert (code, answer.split()[0], facts(answer)) == (1, "error", "0")
    assert helper.written == ""


def test_what_it_cannot_do_it_says(helper: Helper) -> None:
    shutil.rmtree(helper.proc / "sys")
    code, answer = helper.run()
    assert (code, answer.split()[:4]) == (1, ["error", "the", "kernel", "refused"])
    shutil.rmtree(helper.state)
    code, answer = helper.run()
    assert (code, answer.split()[0], facts(answer)) == (1, "error", f"{helper.state}/lock")


# The firewall sample.


def test_the_firewall_opens_two_ports_to_strangers() -> None:
    text = re.sub(r"#.*", "", (DEPLOY / "nftables.conf").read_text())
    assert "hook input priority filter; policy drop;" in text
    assert re.search(r"define api_port = 4000\n", text)
    open_to_all = re.findall(r"^\s*tcp dport (.*) accept$", text, re.MULTILINE)
    assert open_to_all == ["{ $ssh_port, $api_port }"]
    links = re.search(r"define qsfp = \{(.*)\}", text)
    assert links is not None
    assert re.findall(r'"(.*?)"', links[1]) == ["enp1s0f0np0", "enp1s0f1np1", "enP2p1s0f0np0", "enP2p1s0f1np1"]
    assert "iifname $qsfp jump links" in text


def test_nft_takes_the_firewall() -> None:
    """By nft itself where it is installed, in a network namespace of its own; its brackets are checked everywhere."""
    path = DEPLOY / "nftables.conf"
    text = re.sub(r"#.*", "", path.read_text())
    assert text.count("{") == text.count("}")
    nft = shutil.which("nft", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if nft is None:
        pytest.skip("nft is not installed")
    done = call("unshare", "--map-root-user", "--net", nft, "--check", "--file", path)
    assert (done.returncode, done.stderr) == (0, "")
