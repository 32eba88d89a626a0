"""The doctor's verdicts: one prepared Spark in which nothing is wrong, and one fault at a time."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sparkd.__main__ import exit_code
from sparkd.condition import Condition
from sparkd.config.config import load_config
from sparkd.doctor import host, memory, storage, system
from sparkd.doctor.fixes import fixes_of
from sparkd.doctor.report import Report, examined, report
from sparkd.errors import Unavailable
from sparkd.fabric.checks import Finding
from sparkd.fabric.report import report as fabric_report
from sparkd.state.model_state import ModelState
from tests.sparkd.gateway.fakes import view
from tests.support.doctor_tree import GOOD, LIMITS, MEMINFO, fixture, write
from tests.support.fabric_tree import scenarios, write_nodes
from tests.support.facts import lacking
from tests.support.waiting import HUNG_S
from workers.host import bounded_child, disk_rate, inspection, network

GIB_KIB = 1 << 20
DRIVER = "NVRM version: NVIDIA UNIX {0}Kernel Module for aarch64  {1}  Release Build\n"
SMI = "captured/nvidia-smi.txt"
STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# fault -> (what it changes, check, verdict, a word of the cure)
SWAPS = {"proc/meminfo": fixture("meminfo/idle.txt") + f"SwapTotal: {143 * GIB_KIB} kB\nSwapFree: 0 kB\n"}
FAULTS: Mapping[str, tuple[Mapping[str, str | None], str, str, str]] = {
    "KHO holds free memory": ({"proc/meminfo": MEMINFO + "CmaTotal: 0 kB\nCmaFree: 10171187 kB\n"}, "kho", "fail", "kho=off"),
    "a kernel that panics": ({"proc/sys/kernel/osrelease": "6.17.0-1008-nvidia\n"}, "kernel", "fail", "6.17.0-1032"),
    "a stranger's kernel": ({"proc/sys/kernel/osrelease": "6.17.0-14-generic\n"}, "kernel", "warn", "NVIDIA's kernel"),
    "no driver": ({"proc/driver/nvidia/version": None, SMI: None, "sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark"}, "driver", "fail",
    "580-open"),
    "the proprietary driver": ({"proc/driver/nvidia/version": DRIVER.format("", "580.173.02")}, "driver", "fail", "nvidia-driver-580-open"),
    "a driver that hangs in capture": ({"proc/driver/nvidia/version": DRIVER.format("Open ", "590.48.01")}, "driver", "warn", "580"),
    "nvidia-smi that hangs": ({"captured/nvidia-smi.hung": ""}, "nvidia-smi", "fail", "restart"),
    "the low-power latch": ({SMI: "NVIDIA GB10, 580.142, 96, 19.5, 611, 3003\n"}, "low-power", "fail", "power plug"),
    "the same with a decimal comma": ({SMI: "NVIDIA GB10, 580.142, 96, 19,5, 611, 3003\n"}, "low-power", "fail", "power plug"),
    "a deadlocked kernel": ({SMI: "NVIDIA GB10, 580.142, 96, 17.0, 2400, 3003\n"}, "low-power", "warn", "unload the model"),
    "an old BIOS": ({"sys/class/dmi/id/bios_date": "01/20/2026\n"}, "firmware", "warn", "fwupdmgr"),
    "the driver out of memory": ({"captured/dmesg.txt": fixture("dmesg/nvrm-no-memory.txt") * 163}, "kernel-log", "fail", "os_reserve_gib"),
    "that once": ({"captured/dmesg.txt": fixture("dmesg/nvrm-no-memory.txt")}, "kernel-log", "warn", "os_reserve_gib"),
    "a driver's deadlock": ({"captured/dmesg.txt": fixture("dmesg/hung-tasks.txt")}, "kernel-log", "fail", "Restart"),
    "no swap": ({"proc/meminfo": fixture("meminfo/idle.txt") + "SwapTotal: 0 kB\n"}, "swap", "warn", "mkswap"),
    "too much swap": (SWAPS, "swap", "warn", "`sudo swapoff AREA`"),
    "a container's memory limit": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{24 << 30}\n",
    "sys/fs/cgroup/memory.current": "0\n"}, "memory-limit", "warn", "MemoryMax="),
    "swappiness": ({"proc/sys/vm/swappiness": "60\n"}, "swappiness", "warn", "vm.swappiness=10"),
    "dirty pages": ({"proc/sys/vm/dirty_bytes": "0\n", "proc/sys/vm/dirty_ratio": "20\n"}, "dirty", "warn", "vm.dirty_bytes=268435456"),
    "a large reserve of the kernel's": ({"proc/sys/vm/min_free_kbytes": "4194304\n"}, "min-free", "warn", "45167"),
    "no helper": ({"run/sparkd-dropcache.sock": None, "usr/lib/systemd/system/sparkd-dropcache.socket": ""}, "page-cache", "warn",
    "enable --now"),
    "earlyoom hunts python": ({"etc/default/earlyoom": "EARLYOOM_ARGS=\"-m 2 --prefer '(vllm|ray|python3)'\"\n"}, "killers", "warn",
    "--avoid"),
    "systemd-oomd": ({"etc/systemd/system/multi-user.target.wants/systemd-oomd.service": ""}, "killers", "warn",
    "disable --now systemd-oomd"),
    "another engine": ({"proc/4711/stat": f"4711 (VLLM::EngineCor) S 1 4711 4711{' 0' * 20}"}, "others", "warn", "os_reserve_gib"),
    "a leak": ({"proc/meminfo": MEMINFO.replace("102000000", "62000000")}, "leak", "fail", "-lname"),
    "a desktop": ({"etc/systemd/system/default.target": "-> /usr/lib/systemd/system/graphical.target"}, "desktop", "ok", "multi-user"),
    "no PSI": ({"proc/pressure/memory": None}, "pressure", "warn", "psi=1"),
    "nothing kept for a shell": ({"etc/systemd/system/user.slice.d/50-sparkd.conf": None}, "operator", "ok", "MemoryMin=4G"),
    "memlock": ({"proc/self/limits": LIMITS.format("8388608")}, "memlock", "fail", "LimitMEMLOCK=infinity"),
    "no verbs": ({"dev/infiniband/uverbs0": None}, "infiniband", "fail", "modprobe -a ib_uverbs"),
    "no verbs in a container": ({"dev/infiniband/uverbs0": None, ".dockerenv": ""}, "infiniband", "fail", "--device=/dev/infiniband"),
    "no device for CUDA": ({"dev/nvidia-uvm": None}, "devices", "fail", "nvidia-modprobe"),
    "a model without main": ({"root/.cache/huggingface/hub/models--a--b/refs/main": None}, "hub-cache", "warn", "refs/main"),
}  # fmt: skip


def found_in(root: Path) -> Report:
    raw = inspection.sample(root)
    return report({raw["host"]: raw})


def of_check(found: Report, check: str) -> list[Finding]:
    return [one for one in found.findings if one.check == check]


def test_nothing_is_wrong_with_a_prepared_spark(tmp_path: Path) -> None:
    found = found_in(write(tmp_path))

    assert [one for one in found.findings if one.verdict != "ok" or one.cure] == []
    assert (found.nodes, found.verdict) == (["spark-1"], "ok")
    assert of_check(found, "platform")[0].evidence == "GX10, DGX OS 7.6.0, 121.6 GiB"
    assert "hf_" not in json.dumps(asdict(found))


@pytest.mark.parametrize(("changes", "check", "verdict", "cure"), FAULTS.values(), ids=FAULTS)
def test_one_fault_at_a_time(tmp_path: Path, changes: Mapping[str, str | None], check: str, verdict: str, cure: str) -> None:
    found = found_in(write(tmp_path, changes))
    wrong = [one for one in found.findings if one.verdict != "ok" or one.cure]

    assert [(one.check, one.verdict) for one in wrong if one.check == check] == [(check, verdict)]
    assert any(cure in one.cure for one in wrong), wrong
    assert {one.check for one in wrong} <= {check, "nvidia-smi"}
    # A cure in words has no command.
    assert all(one.command is None or f"`{one.command}`" in one.cure for one in found.findings)
    assert all(one.command for one in wrong if one.cure.startswith("`") and one.check != "kernel-log")


# Checks whose fault is no text in a file: each has a test of its own below.
_NO_FILE = {"compiled", "disk", "disk-rate", "shared-memory", "time-outs"}


def test_every_check_of_a_node_has_a_fault() -> None:
    sources = [Path(str(part.__file__)).read_text(encoding="utf-8") for part in (system, memory, storage)]
    checks = {check for text in sources for check in re.findall(r'\bhost\.find\(\s*"([\w-]+)"', text)}

    assert len(checks) > 20
    assert checks - {check for _, check, _, _ in FAULTS.values()} == _NO_FILE, "a check has its fault in FAULTS"


def test_every_path_that_a_check_looks_at_is_one_that_a_node_reads() -> None:
    """Else a new check would find nothing on any node, and nobody would notice."""
    sources = "".join(Path(str(part.__file__)).read_text(encoding="utf-8") for part in (host, system, memory, storage))
    read = set(re.findall(r"""\.(?:text|number)\(["']([^"']+)""", sources))
    looked_for = set(re.findall(r'\.has\("([^"]+)"', sources))

    assert read == set(inspection.FILES)
    assert len(looked_for) > 4 and looked_for <= set(inspection.PATHS)


@pytest.mark.parametrize("answer", ["No devices were found\n", "\n"])
def test_no_gpu_is_not_well(tmp_path: Path, answer: str) -> None:
    found = [one for one in found_in(write(tmp_path, {SMI: answer})).findings if one.about == "GPU"]

    assert [(one.check, one.verdict) for one in found] == [("nvidia-smi", "fail")]


def test_a_machine_that_is_no_spark_is_not_measured_by_one(tmp_path: Path) -> None:
    gone = (
        "sys/class/dmi/id/product_name",
        "etc/dgx-release",
        "proc/driver/nvidia/version",
        SMI,
        "etc/systemd/system/user.slice.d/50-sparkd.conf",
    )
    found = found_in(write(tmp_path, dict.fromkeys(gone) | {"proc/sys/kernel/osrelease": "6.1.0-20-amd64\n"}))
    assert found.verdict == "ok"


@pytest.mark.parametrize(
    ("changes", "check", "evidence"),
    [
        ({"proc/meminfo": None}, "platform", ["GX10, DGX OS 7.6.0"]),
        ({"proc/sys/vm/dirty_bytes": "0\n", "proc/sys/vm/dirty_ratio": "x\n"}, "dirty", []),
        ({"root/.cache/huggingface/token": ""}, "hub-cache", [""]),
    ],
)
def test_what_was_not_seen_is_not_well(tmp_path: Path, changes: Mapping[str, str | None], check: str, evidence: list[str]) -> None:
    found = [one.evidence for one in of_check(found_in(write(tmp_path, changes)), check)]
    assert len(found) == len(evidence) and all(map(str.startswith, found, evidence)), found


def test_this_machine_can_be_looked_at() -> None:
    raw = inspection.sample()
    found = report({raw["host"]: raw})
    assert {"platform", "kernel", "memlock", "disk"} <= {one.check for one in found.findings}
    json.dumps(raw)


def test_caches_of_somebody_else_and_of_an_older_vllm(tmp_path: Path) -> None:
    write(tmp_path)
    os.chown(tmp_path / "root/.cache/huggingface/hub/models--a--b/refs", os.getuid(), os.getgid())
    raw = inspection.sample(tmp_path)
    raw["runtime_at_s"] = time.time() + 60
    raw["hubs"][0] |= {"foreign": ["models--a--b", "models--c--d"], "incomplete_bytes": 1 << 30}
    found = report({"n": raw})

    assert "rm -rf" in of_check(found, "compiled")[0].cure
    owner, broken = of_check(found, "hub-cache")
    assert owner.evidence.startswith("a/b, c/d ") and "chown -R" in owner.cure
    assert broken.evidence.startswith("1.0 GiB of ")


def test_nodes_that_differ_are_told_and_silent_ones_fail(tmp_path: Path) -> None:
    a = inspection.sample(write(tmp_path / "a"))
    b = inspection.sample(write(tmp_path / "b", {"proc/sys/kernel/osrelease": "6.17.0-1031-nvidia\n"}))
    found = report({"a": a | {"plugin": "1"}, "b": b | {"plugin": "2"}, "c": None})

    told = {one.about: (one.verdict, one.evidence) for one in of_check(found, "equal")}
    assert told["kernel"] == ("warn", "a 6.17.0-1032-nvidia, b 6.17.0-1031-nvidia")
    assert told["sparkd"] == ("fail", "a 1, b 2")
    assert told["driver"][0] == "ok"
    assert of_check(found, "agent")[0].node == "c"


def test_a_running_daemon_adds_its_time_outs_nodes_without_a_guard_and_failed_models(tmp_path: Path) -> None:
    flags = {"health_check_timeout_s": 120, "state_dir": str(tmp_path)}
    failed = replace(view("m", state=ModelState.FAILED), reason="ServeTwice", message="Take it out.", node="n")
    unguarded = Condition("GuardAbsent", "No guard watches.", "n")
    readings = {"n": inspection.sample(write(tmp_path))}
    found = examined(readings, load_config(None, flags=flags, environ={}), [failed, view("fine")], [unguarded])

    assert [(one.about, one.evidence) for one in of_check(found, "time-outs")] == [
        ("health_check_timeout_s", "health_check_timeout_s is 120"),
    ]
    assert [(one.verdict, one.node, one.evidence) for one in of_check(found, "guard")] == [("fail", "n", "No guard watches.")]
    assert of_check(found, "model") == [Finding("model", "fail", "n", "m", "ServeTwice", "Take it out.")]


# Programs that hang, and disks


def test_a_program_that_does_not_end_is_left_behind_in_time() -> None:
    answer = bounded_child.ask(["sleep", "3600"], 0.05)
    assert (answer.hung, lacking(answer.trouble, "sleep", "0.05 s")) == (True, [])
    assert bounded_child.stuck() == 0


@pytest.mark.parametrize(
    ("command", "facts"),
    [
        (["no-such-program"], ["no-such-program"]),
        (["sh", "-c", "echo gone >&2; exit 9"], ["sh", "exit code 9: gone"]),
        (["true"], []),
    ],
)
def test_what_a_program_answers(command: list[str], facts: list[str]) -> None:
    trouble = bounded_child.ask(command, HUNG_S).trouble
    assert (trouble is not None, lacking(trouble, *facts)) == (bool(facts), [])


def test_the_rate_of_a_disk_is_measured_on_the_largest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_rate, "SMALLEST_BYTES", 1)
    (tmp_path / "m").mkdir()
    for name, size in (("a", 10), ("b", 9 << 20)):
        (tmp_path / "m" / f"{name}.safetensors").write_bytes(bytes(size))
    path = disk_rate.largest([tmp_path])
    assert path == tmp_path / "m" / "b.safetensors"
    done, seconds, _ = disk_rate.rate(path)
    assert done == 9 << 20 and seconds >= 0
    assert disk_rate.largest([tmp_path / "nowhere"]) is None


@pytest.mark.parametrize(("seconds", "verdict"), [(1.0, "ok"), (10.0, "warn")])
def test_a_slow_disk_is_told(tmp_path: Path, seconds: float, verdict: str) -> None:
    raw = inspection.sample(write(tmp_path)) | {"disk_rate": {"path": "/m", "bytes": 2 << 30, "seconds": seconds, "direct": True}}
    assert of_check(report({"n": raw}), "disk-rate")[0].verdict == verdict


@pytest.mark.parametrize(("free_bytes", "verdict"), [(1 << 40, "ok"), (1 << 30, "warn")])
def test_a_disk_without_room_is_a_finding(tmp_path: Path, free_bytes: int, verdict: str) -> None:
    raw = inspection.sample(write(tmp_path)) | {"disks": [{"path": "/", "free_bytes": free_bytes, "total_bytes": 4 << 40}]}
    assert [(one.about, one.verdict) for one in of_check(report({"n": raw}), "disk")] == [("/", verdict)]


def test_shared_memory_of_ended_engines_is_a_finding_once_it_is_old(tmp_path: Path) -> None:
    files = [{"name": "psm_1", "bytes": 8 << 30, "age_s": 1e6}, {"name": "psm_new", "bytes": 8 << 30, "age_s": 1.0}]
    raw = inspection.sample(write(tmp_path)) | {"shared": files}

    (finding,) = of_check(report({"n": raw}), "shared-memory")
    assert finding.verdict == "warn" and "/dev/shm/psm_1`" in finding.cure
    assert of_check(report({"n": raw | {"shared": files[1:]}}), "shared-memory") == []


# The verb


def test_the_verb_looks_at_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["doctor", "--root", str(write(tmp_path / "good"))]) == 0
    assert capsys.readouterr().out.startswith("ok  spark-1: platform, ")
    changes, *_ = FAULTS["KHO holds free memory"]
    assert exit_code(["--json", "doctor", "--root", str(write(tmp_path / "bad", changes))]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "fail"
    assert exit_code(["doctor", "--root", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(("verb", "as_json"), [("doctor", False), ("doctor", True), ("fabric", True), ("fabric --env", False)])
def test_a_hosts_name_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str, as_json: bool
) -> None:
    roots = write_nodes(tmp_path, scenarios()["pair-two-cables"]["nodes"]) if verb != "doctor" else [write(tmp_path / "a")]
    for number, root in enumerate(roots):
        (root / "etc").mkdir(exist_ok=True)
        (root / "etc/hostname").write_text(f"{number}\x1b]0;owned\x07\x1b[2J\x9b31m\x00 [/] [bold]x\nsecond line\n")

    linked = fabric_report({str(raw["host"]): raw for raw in map(network.sample, roots)})
    monkeypatch.setattr("sparkd.admin.client.Client.get", lambda client, path: linked)
    words = verb.split() if verb != "doctor" else [verb, "--root", str(roots[0])]
    assert exit_code([*(["--json"] if as_json else []), *words]) in (0, 1)
    out, err = capsys.readouterr()
    assert not STEERS.search(out + err)
    assert "owned" in out and "second line" not in out


def test_the_daemon_is_asked_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "nodes": ["n"],
        "findings": [{"check": "kho", "verdict": "fail", "node": "n", "about": "kernel", "evidence": "e", "cure": "c"}],
        "verdict": "fail",
    }
    monkeypatch.setattr("sparkd.admin.client.Client.get", lambda client, path: told)
    assert exit_code(["doctor"]) == 1
    assert "fail  n, kernel, kho: e\n      c" in "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())

    def nobody(client: object, path: str) -> None:
        raise Unavailable("No sparkd answers.")

    monkeypatch.setattr("sparkd.admin.client.Client.get", nobody)
    raw = inspection.sample() | {"caches": [{"path": "/root/.triton/cache", "foreign": False, "newest_at_s": 5.0}]}
    monkeypatch.setattr(inspection, "sample", lambda root, runtime: raw | {"runtime_at_s": 9.0 if runtime == sys.executable else None})
    exit_code(["doctor"])
    told = capsys.readouterr()
    assert lacking(told.err, "node only") == [] and told.err.count("\n") == 1
    assert lacking(told.out, "/root/.triton/cache", "older") == []


def test_a_fix_is_asked_for_made_and_can_be_undone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = FAULTS["swappiness"][0] | FAULTS["dirty pages"][0]
    root = write(tmp_path, changes)
    answers = iter([True, False])
    monkeypatch.setattr("typer.confirm", lambda *_, **__: next(answers))

    assert exit_code(["doctor", "--fix", "--root", str(root)]) == 0
    made = root / "etc/sysctl.d/60-sparkd-swappiness.conf"
    assert made.read_text() == "vm.swappiness = 10\n"
    assert not (root / "etc/sysctl.d/60-sparkd-dirty-bytes.conf").exists()
    told = capsys.readouterr().out
    assert "rm /etc/sysctl.d/60-sparkd-swappiness.conf && sysctl vm.swappiness=60" in told

    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    assert exit_code(["doctor", "--fix", "--root", str(root)]) == 3, "what is there is written over"
    assert "another program" in capsys.readouterr().err


def test_what_is_never_mended_without_a_person(tmp_path: Path) -> None:
    faults = {name: text for changes, *_ in FAULTS.values() for name, text in changes.items() if text is not None}
    raw = inspection.sample(write(tmp_path, faults | {"run/sparkd-dropcache.sock": None} | FAULTS["nothing kept for a shell"][0]))
    found = report({"n": raw})
    made = {one.check: one for one in fixes_of(map(asdict, found.findings), raw)}

    assert set(made) == {"swappiness", "dirty", "page-cache", "operator"}
    assert made["dirty"].undo.endswith("sysctl vm.dirty_ratio=20")
    assert made["page-cache"].undo == "systemctl disable --now sparkd-dropcache.socket"
    assert fixes_of(map(asdict, found_in(write(tmp_path / "good")).findings), inspection.sample(tmp_path / "good")) == []
    assert GOOD["proc/sys/vm/swappiness"] == "10\n"
