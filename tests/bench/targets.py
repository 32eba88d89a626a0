"""The processes that benches of the gateway and the page start: stub, proxies, parts of the daemon; and what the kernel says of them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
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
    argv = [sys.executable, "-m", "tests.stub", "serve", "stub", *where, "--served-model-name", model]
    with _answering(argv, folder / f"stub{port}.log", uds or ("127.0.0.1", port), core):
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
    argv = [program, "-e", str(folder / "nginx.log"), "-c", str(config), "-p", str(folder)]
    with _answering(argv, folder / "nginx.out", ("127.0.0.1", port), core) as child:
        yield Target("nginx", "127.0.0.1", port, child.pid, model, rss_idle_kib=rss_kib(child.pid))


@contextmanager
def gateway(folder: Path, core: int, uds: str, model: str) -> Iterator[Target]:
    """sparkd's gateway in a process of its own, without supervisor and Ray."""
    with part(folder, "gateway", {"stub-socket": uds, "model": model}, core) as (child, port):
        yield Target("sparkd", "127.0.0.1", port, child.pid, model, rss_idle_kib=rss_kib(child.pid))


@contextmanager
def part(folder: Path, name: str, settings: Mapping[str, object], core: int | None = None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A part of the daemon (gateway_target.py, page_target.py) and its port; it has a pipe as standard input."""
    port = free_port()
    argv = [sys.executable, "-m", f"tests.bench.{name}_target", "--port", str(port)]
    argv += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    with _answering(argv, folder / f"{name}.log", ("127.0.0.1", port), core) as child:
        yield child, port


def rss_kib(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss) >> 10


def cpu_ms(pid: int) -> float:
    """Time on a CPU of every thread, ms: the first field of schedstat, in ns."""
    total_ns = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            total_ns += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
    return total_ns / 1e6


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
def _answering(argv: list[str], log: Path, address: str | tuple[str, int], core: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that accepts connections at `address`, on one core where one is given."""
    with log.open("wb") as out:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, stderr=out)
    if core is not None:
        os.sched_setaffinity(child.pid, {core})
    try:
        until(lambda: child.poll() is not None or _answers(address), f"it answers, see {log}", 0.02, limit_s=_START_S)
        if child.poll() is not None:
            raise SystemExit(f"process {child.pid} did not come up: {log.read_text()[-2000:]}")
        yield child
    finally:
        if child.stdin:
            child.stdin.close()
        child.terminate()
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _answers(address: str | tuple[str, int]) -> bool:
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True
