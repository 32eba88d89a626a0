"""Known lines of real logs, what they come to, and that nothing of a line but numbers and names is taken over."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

from sparkd.control.decision import Fail
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Diagnosis
from tests.sparkd.control.test_decision import ALIVE, DEAD, running
from tests.support.facts import facts
from tests.support.model_records import planned
from tests.workers.rank.test_log_parser import ERROR, read
from workers.rank.signatures import LASTING, SIGNATURES, diagnose

FIXTURES = Path(__file__).parents[2] / "fixtures"
# Wording of vLLM 0.32, transformers 4.57, huggingface_hub 1.1, torch 2.13, NCCL 2.28 and Linux 6.17, as their sources have it.
LINES = {
    "KvCacheDoesNotFit": "ValueError: To serve at least one request with the model's max seq len (8192), (9.0 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated maximum model length is 91",
    "NoRoomForKvCache": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing",
    "CudaOutOfMemory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 121.69 "
    "GiB of",
    "SharedMemoryFull": "OSError: [Errno 28] No space left on device: '/psm_25dd9c55'",
    "RailUnreachable": "spark-1:3:9 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4> with status=12 IBV_WC_RETRY_EXC_ERR(12)",
    "NcclFailed": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error (run with "
    "NCCL_DEBUG=INFO)",
    "FlagRefused": "api_server.py: error: argument --block-size: invalid choice: 17 (choose from 1, 8, 16)",
    "UnknownFlag": "api_server.py: error: unrecognized arguments: --no-such-flag",
    "QuantizationUnknown": "  Value error, Unknown quantization method: modelopt_fp5. Must be one of ['awq', 'fp8']. [type=value_error",
    "PackageMissing": "Qwen3VLVideoProcessor requires the Torchvision library but it was not found in your environment. Check out the",
    "Fp4KernelFailed": "RuntimeError: [FP4 gemm Runner] Failed to run cutlass FP4 gemm on sm120/sm121. Error: Error Internal",
    "NoKernelImage": "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    "ArchitectureUnknown": "  Value error, Model architectures ['Qwen9ForCausalLM'] are not supported for now. Supported architectures: "
    "dict_keys",
    "ContextTooLong": "  Value error, User-specified max_model_len (300000) is greater than the derived max_model_len "
    "(max_position_embeddings=262144",
    "RemoteCode": "  Value error, The repository /models/x contains custom code which must be executed to correctly load the model.",
    "CodeUntrusted": "RuntimeError: Code of other/code is not trusted at any commit: trust_remote_code is for owner/name here. Read that",
    "Gated": "huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo for url "
    "https://huggingface.co/api/models/x.",
    "DiskFull": "OSError: [Errno 28] No space left on device: '/var/lib/models/x.incomplete'",
    "NoGpu": "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG` to turn on verbose",
    "GpuFault": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
}
FILES = {
    "vllm-logs/memory-gate-error.txt": "StartMemoryShort",
    "vllm-logs/quantization-errors.txt": "KernelMissing QuantizationMismatch",
    "vllm-logs/backend-selection.txt": "MoeBackendRefused",
    "vllm-logs/shm-broadcast-wait.txt": "RankStalled",
    "vllm-logs/toolchain-errors.txt": "PtxasTooOld",
    "vllm-logs/cpu-0.32.0-native-rank0-peer-killed.txt": "RankGone",
    "ray-logs/oom-monitor-kill.txt": "RayKilledForMemory",
    "nccl-logs/gid-wrong.txt": "GidWrong NcclFailed",
    "nccl-logs/wrong-pairing.txt": "RailUnreachable",
    "dmesg/nvrm-no-memory.txt": "DriverOutOfMemory",
    "dmesg/hung-tasks.txt": "DriverDeadlock",
    "dmesg/oom-killer-vllm-worker.txt": "KilledByKernel",
    "dmesg/proprietary-module.txt": "ProprietaryDriver",
    # Nothing is wrong in these.
    "vllm-logs/cpu-0.32.0-single-start-serve-sigterm.txt": "",
    "vllm-logs/cpu-0.32.0-native-rank0-start.txt": "",
    "vllm-logs/cpu-0.32.0-native-rank1-start.txt": "",
    "vllm-logs/memory-success-0.33.txt": "",
    "vllm-logs/startup-progress.txt": "",
    "ray-logs/vllm-0.32.0-ray-executor-start.txt": "",
    "nccl-logs/ib-good.txt": "",
    "dmesg/cx7-cable-plug.txt": "",
}


def named(text: str) -> str:
    return " ".join(dict.fromkeys(found.name for line in text.splitlines() if (found := diagnose(line))))


def test_captured_texts() -> None:
    assert {file: named((FIXTURES / file).read_text()) for file in FILES} == FILES


def test_the_wording_of_releases() -> None:
    assert {name: named(line) for name, line in LINES.items()} == {name: name for name in LINES}


def test_every_signature_has_a_line_here_and_sentences() -> None:
    proved = set(" ".join(FILES.values()).split()) | LINES.keys()
    for one_of in SIGNATURES:
        assert one_of.name in proved
        assert re.fullmatch(r"[A-Z]\w+", one_of.name)
        assert one_of.cause.endswith(".") and one_of.cure.endswith(".")


def test_what_waiting_does_not_heal_is_a_signature_or_the_loaders_refusal() -> None:
    assert LASTING - {one.name for one in SIGNATURES} == {"LoadRefused"}


def test_numbers_are_taken_over_and_nothing_else() -> None:
    found = diagnose((FIXTURES / "vllm-logs/memory-gate-error.txt").read_text())
    assert found is not None
    assert facts(found.cause) == "104.46 121.69 105.87 gpu_memory_utilization 0.87"
    secret = "hf_0123456789abcdefghijklmnop"
    for line in [*LINES.values(), *(text for file in FILES for text in (FIXTURES / file).read_text().splitlines())]:
        found = diagnose(f"{secret} {line} {secret} /home/anna")
        assert found is None or not {word for word in (secret, "anna") if word in found.cause + found.cure}


def test_the_weightiest_line_counts_and_remarks_do_not() -> None:
    gone, memory = "RuntimeError: Connection closed by peer [10.0.0.2]:1", LINES["CudaOutOfMemory"]
    assert read(ERROR + gone, ERROR + memory, ERROR + LINES["GpuFault"]).diagnosis == diagnose(memory)
    assert read(f"(EngineCore pid=1) WARNING 11-21 07:00:00 [a.py:1] {memory}").diagnosis is None
    told = read(
        f"(EngineCore pid=1) INFO 11-21 07:00:00 [shm_broadcast.py:1] {(FIXTURES / 'vllm-logs/shm-broadcast-wait.txt').read_text()}"
    )
    assert told.diagnosis and told.diagnosis.name == "RankStalled"


def test_what_a_request_quotes_is_no_diagnosis() -> None:
    parser = read(ERROR + LINES["NcclFailed"], "Application startup complete.")
    assert parser.diagnosis is None
    parser.feed(f"(APIServer pid=1) ERROR 11-21 07:00:00 [serving.py:1] ValueError: {LINES['CudaOutOfMemory']}", 1100.0)
    assert parser.diagnosis is None
    parser.feed(ERROR + LINES["GpuFault"], 1200.0)
    assert parser.diagnosis and parser.diagnosis.name == "GpuFault"


def test_a_start_that_failed_ends_with_cause_and_cure() -> None:
    found = diagnose(LINES["UnknownFlag"])
    assert found is not None
    fact = replace(DEAD, exit_code=2, diagnosis=Diagnosis(**asdict(found)))
    assert planned(running(ModelState.LOADING, fact)) == [
        Fail("m", "UnknownFlag", f"{found.cause} {found.cure} The engine ended (exit code 2); see `sparkd logs m`.", found.cause)
    ]


def test_a_hint_explains_a_start_that_took_too_long_and_names_no_end() -> None:
    hint = Diagnosis("RankStalled", 1, "A rank has not answered.", "Wait.")
    (ended,) = planned(running(ModelState.LOADING, replace(DEAD, diagnosis=hint)))
    (slow,) = planned(running(ModelState.LOADING, replace(ALIVE, diagnosis=hint), attempt_since_s=0.0, start_deadline_s=9.0))

    assert isinstance(ended, Fail) and ended.reason == "EngineExited"
    assert isinstance(slow, Fail) and slow.reason == "StartTimeout" and f"{hint.cause} {hint.cure}" in slow.message
