"""The processes of the gateway benchmark: stub and proxies; and what the kernel says of them. Never sends a request."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.daemon_process import free_port
from tests.support.waiting import until

_START_S = 30.0
_STOP_S = 10.0
# proxy_buffering off and HTTP/1.1 with keep-alive upstream: nginx at its best for event streams.
_NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; default_type application/json; keepalive_requests 100000000; client_body_buffer_size 64k;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream engine {{ server unix:{socket}; keepalive 512; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host engine;
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""
_READER = "import socket,sys\ns=socket.socket(fileno=int(sys.argv[1]))\nwhile s.recv(64): pass"


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers under host:port. `pid` None: no proxy, hence no cost to read. `rss_idle_kib` was read before any load."""

    name: str
    host: str
    port: int
    pid: int | None
    model: str
    rss_idle_kib: int = 0


@dataclass(frozen=True, slots=True)
class Cores:
    """Which core runs what; both the same where there is only one."""

    load: int
    proxy: int

    @classmethod
    def choose(cls) -> Cores:
        allowed = sorted(os.sched_getaffinity(0))
        return cls(load=allowed[0], proxy=allowed[1 % len(allowed)])


@contextmanager
def stub(folder: Path, core: int, *, uds: str | None = None, port: int = 0, model: str) -> Iterator[None]:
    where = ["--uds", uds] if uds else ["--host", "127.0.0.1", "--port", str(port)]
    argv = [sys.executable, "-m", "workers.stub", "serve", "stub", *where, "--served-model-name", model]
    with _process(argv, core, folder / f"stub{port}.log") as child:
        _wait(child, uds or ("127.0.0.1", port), folder / f"stub{port}.log")
        yield


@contextmanager
def nginx(folder: Path, core: int, uds: str, model: str) -> Iterator[Target | None]:
    """None where nginx is not on PATH."""
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if program is None:
        yield None
        return
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, socket=uds, port=port))
    log = folder / "nginx.out"
    with _process([program, "-e", str(folder / "nginx.log"), "-c", str(config), "-p", str(folder)], core, log) as child:
        _wait(child, ("127.0.0.1", port), log)
        yield Target("nginx", "127.0.0.1", port, child.pid, model, rss_idle_kib=rss_kib(child.pid))


@contextmanager
def gateway(folder: Path, core: int, uds: str, model: str) -> Iterator[Target]:
    """sparkd's gateway in a process of its own, without supervisor and Ray."""
    port = free_port()
    argv = [sys.executable, "-m", "tests.bench.gateway_target", "--stub-socket", uds, "--port", str(port), "--model", model]
    log = folder / "gateway.log"
    with _process(argv, core, log) as child:
        _wait(child, ("127.0.0.1", port), log)
        yield Target("sparkd", "127.0.0.1", port, child.pid, model, rss_idle_kib=rss_kib(child.pid))


def rss_kib(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss) >> 10


def cpu_ms(pid: int) -> float:
    """Time on a CPU of every thread, ms: the first field of schedstat, in ns."""
    total_ns = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            total_ns += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
    return total_ns / 1e6


def wake_ms_per_1000(cores: Cores) -> float:
    """What the kernel alone takes for waking up and handing one packet to a process that sleeps on the other core, 1000 times, in ms.

    Between 10 and 50 on virtual machines, where waking an idle core leaves the guest: the part of a proxy's cost that no proxy can save.
    """
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-c", _READER, str(theirs.fileno())]
    with ours, subprocess.Popen(argv, pass_fds=[theirs.fileno()]) as reader:
        theirs.close()
        os.sched_setaffinity(reader.pid, {cores.load})
        os.sched_setaffinity(0, {cores.proxy})
        ours.send(b"x")
        time.sleep(0.2)  # the reader starts meanwhile
        began_ns = time.thread_time_ns()
        for _ in range(1000):
            time.sleep(0.0005)
            ours.send(b"x")
        spent_ns = time.thread_time_ns() - began_ns
        ours.shutdown(socket.SHUT_RDWR)
    os.sched_setaffinity(0, {cores.load})
    return spent_ns / 1e6


def busy_s() -> float:
    """Seconds all cores together were not idle since boot."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


@contextmanager
def generator(folder: Path, core: int) -> Iterator[subprocess.Popen[str]]:
    """tests.bench.load with its pipes open."""
    argv = [sys.executable, "-m", "tests.bench.load"]
    with (folder / "load.log").open("wb") as log:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    os.sched_setaffinity(child.pid, {core})
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@contextmanager
def _process(argv: list[str], core: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    os.sched_setaffinity(child.pid, {core})
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _wait(child: subprocess.Popen[bytes], address: str | tuple[str, int], log: Path) -> None:
    until(lambda: child.poll() is not None or _answers(address), f"it answers, see {log}", 0.02, limit_s=_START_S)
    if child.poll() is not None:
        raise SystemExit(f"process {child.pid} did not come up: {log.read_text()[-2000:]}")


def _answers(address: str | tuple[str, int]) -> bool:
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True
