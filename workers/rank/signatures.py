"""Owns the meaning of known lines of engines, Ray and the kernel: cause and cure, in words of ours. Never opens a file, never quotes free
text.

The table is the troubleshooting of people who serve on DGX Sparks (the Spark vLLM guide, NVIDIA's playbooks, issue threads of vLLM,
eugr's spark-vllm-docker, open-gpu-kernel-modules) and the wording of vLLM 0.26 to 0.33, transformers, huggingface_hub, torch and NCCL.
Only numbers and names of flags, methods and devices are taken over from a line: nothing that could be a prompt, a path or a key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from workers.host import trusted_code

# Waiting heals none of these: a flag, a format, an engine or a device has to become another one.
LASTING = frozenset(
    (
        "HeadsDoNotDivide", "LaunchOptionsDoNotDivide", "ServeTwice", "UnknownFlag", "FlagRefused", "QuantizationMismatch",
        "QuantizationUnknown", "BlockSizeRefused", "KernelMissing", "MoeBackendRefused", "PtxasTooOld", "NoKernelImage",
        "ArchitectureUnknown", "ContextTooLong", "RemoteCode", "CodeUntrusted", "LoadRefused",
        "PackageMissing",
    )
)  # fmt: skip
# How much a line tells. Among equals the first one counts: later ones are what followed from it.
HINT, CAUSE, ROOT = 1, 2, 3

_GIB = r"[\d.]{1,12}"
_WORD = r"[\w.-]{1,64}"


@dataclass(frozen=True, slots=True)
class LogSignature:
    """pattern: found anywhere in a line. cause and cure are sentences; {0}, {1} .. stand for what the pattern's groups caught."""

    name: str
    weight: int
    pattern: re.Pattern[str]
    cause: str
    cure: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line understood. name is a CamelCase word that counters and findings carry."""

    name: str
    weight: int
    cause: str
    cure: str

    @property
    def client_message(self) -> str | None:
        """The cause of what waiting does not heal, for a client; None where it names a repository, which is its owner's affair."""
        return self.cause if self.name in LASTING - {"CodeUntrusted"} else None


def diagnose(line: str) -> Diagnosis | None:
    """The first signature of the table that the line carries; None for any other line."""
    if not _ANY.search(line):
        return None
    for signature in SIGNATURES:
        if match := signature.pattern.search(line):
            caught = match.groups()
            return Diagnosis(signature.name, signature.weight, signature.cause.format(*caught), signature.cure.format(*caught))
    return None


def _sign(name: str, weight: int, pattern: str, cause: str, cure: str) -> LogSignature:
    return LogSignature(name, weight, re.compile(pattern), cause, cure)


SIGNATURES = (
    # Memory.
    _sign(
        "StartMemoryShort", ROOT, rf"Free memory on device {_WORD}(?::\d+)? \(({_GIB})/({_GIB}) GiB\) on startup is less than desired GPU "
        rf"memory utilization \(({_GIB}), ({_GIB}) GiB\)",
        "{0} of {1} GiB were free when vLLM started, and its settings take {3} GiB (gpu_memory_utilization {2}).",
        "Unload another model, drop the page cache (`sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'`), or leave "
        "gpu_memory_utilization out, so that sparkd sizes the KV cache from the free memory.",
    ),
    _sign(
        "KvCacheDoesNotFit", ROOT,
        rf"max seq len \((\d{{1,12}})\), \(({_GIB}) GiB KV cache is needed, which is larger than the available KV "
        rf"cache memory \(({_GIB}) GiB\)",
        "One request of {0} tokens needs {1} GiB of KV cache, and {2} GiB are left for it.",
        "Set a smaller max_model_len, kv_cache_dtype: fp8, or a smaller format by quantize; `sparkd plan` shows what fits.",
    ),
    _sign(
        "NoRoomForKvCache", ROOT, r"No available memory for the cache blocks|not enough GPU memory available to serve",
        "The weights and the largest batch leave no memory for a KV cache.",
        "Quantize the weights (quantize: nvfp4), lower max_num_batched_tokens, or raise gpu_memory_utilization where it is set.",
    ),
    _sign(
        "MemoryMovedWhileProfiling", ROOT, r"Error in memory profiling\. Initial free memory",
        "Memory came back from another process while vLLM measured its own: on a Spark both have one memory.",
        "Wait until engines that were stopped have ended, then load again.",
    ),
    _sign(
        "DriverOutOfMemory", ROOT, r"NV_ERR_NO_MEMORY|NVRM: Out of memory",
        "The NVIDIA driver could not get memory from the kernel, which on a Spark comes before the machine freezes.",
        "Serve with more free memory (memory.os_reserve_gib, a smaller KV cache) and see `sparkd doctor` for kernel and page cache.",
    ),
    _sign(
        "CudaOutOfMemory", ROOT,
        r"CUDA out of memory|CUDA error: out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "The GPU had no memory left: weights, KV cache, activations and the page cache share one memory.",
        "Drop the page cache before the start, or use a smaller max_model_len, max_num_batched_tokens or KV cache; `sparkd plan` shows "
        "what fits.",
    ),
    _sign(
        "RayKilledForMemory", ROOT, r"worker\(s\) were killed due to the node running low on memory|Memory on the node .{0,80}\(0\.9\d*\)",
        "Ray's memory monitor killed a rank at 95 % of the node's memory, which a load on a Spark passes.",
        "Set RAY_memory_monitor_refresh_ms=0 on every node, not on the head alone; sparkd does so for the Ray that it starts.",
    ),
    _sign(
        "KilledByKernel", ROOT, r"invoked oom-killer|Out of memory: Killed process|oom-kill:constraint",
        "The kernel's OOM killer ended a process.",
        "Give the engine less, keep about 16 GiB of swap, and see `sparkd doctor`.",
    ),
    _sign(
        "PinnedMemoryRefused", ROOT, r"ibv_reg_mr(?:_iova2)?.{0,120}(?:Cannot allocate memory|ENOMEM|errno 12)",
        "The network card could not pin NCCL's buffers: they lie in memory that the kernel keeps for its own contiguous blocks (KHO, "
        "kernels 7.0), or memlock is too small.",
        "Boot with kho=off or kernel 6.17.0-1032, set memlock to unlimited, and drop the page cache on every node before the start.",
    ),
    _sign(
        "HostOutOfMemory", ROOT, r"Cannot allocate memory|std::bad_alloc|(?:^|\W)MemoryError\b|DefaultCPUAllocator: can't allocate memory",
        "The host's side of the engine could not get memory.",
        "Unload another model, or give this one less; compilers of a first start take 1.5 to 6 GB each (MAX_JOBS limits them).",
    ),
    _sign(
        "SharedMemoryFull", ROOT,
        r"No space left on device.{0,80}(?:/dev/shm|psm_|shm)|Bus error .{0,40}shared memory|insufficient shared memory",
        "/dev/shm is full, or too small for the ranks' messages.",
        "In a container give it --shm-size 10g; otherwise remove what ended engines left there (`sparkd doctor` names it).",
    ),
    # Several nodes.
    _sign(
        "GidWrong", ROOT, r"ibv_modify_qp failed with (?:error )?22|remote GID ::(?!ffff)",
        "RDMA was set up with a GID index that the other end has not at this place: the index differs from node to node.",
        "Take NCCL_IB_GID_INDEX out of every environment, and see `sparkd fabric`.",
    ),
    _sign(
        "RailUnreachable", ROOT, r"ibv_modify_qp failed with (?:error )?110|IBV_WC_RETRY_EXC_ERR|transport retry counter exceeded",
        "One end of an RDMA connection does not reach the other: another subnet, another cable, or an MTU that differs.",
        "See `sparkd fabric` for addresses, cables and MTU of both ends.",
    ),
    _sign(
        "RendezvousTimedOut", ROOT, r"Timed out after (\d{1,6}) seconds waiting for clients\. (\d{1,4})/(\d{1,4}) clients joined",
        "Only {1} of {2} ranks came to the rendezvous within {0} s.",
        "Look at the other ranks' logs: one that did not start, or that cannot reach the first node's address on the cable.",
    ),
    _sign(
        "RankGone", CAUSE, r"Connection closed by peer|Connection reset by peer.{0,80}(?:gloo|nccl)|ncclRemoteError|remote process exited",
        "Another rank of this engine ended, and this one with it.", "Look at the other ranks' logs: the first to end says why.",
    ),
    _sign(
        "NcclFailed", CAUSE, r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|DistBackendError",
        "NCCL could not connect the ranks.", "`sparkd fabric` shows what is wrong with the network; memlock must be unlimited.",
    ),
    _sign(
        "WorldTooLarge", ROOT, r"World size \((\d{1,4})\) is larger than the number of available GPUs \((\d{1,4})\)",
        "The engine needs {0} GPUs and its node has {1}.", "Leave tensor_parallel out, or set it to the number of nodes.",
    ),
    _sign(
        "HeadsDoNotDivide", ROOT, r"Total number of attention heads \((\d{1,5})\) must be divisible by tensor parallel size \((\d{1,4})\)",
        "{0} attention heads cannot be split over {1} ranks.", "Choose a tensor_parallel that divides the heads; `sparkd plan` names them.",
    ),
    _sign(
        "LaunchOptionsDoNotDivide", ROOT, r"Invalid data-parallel launch options",
        "The number of nodes does not divide the number of ranks.", "Leave parallel flags out of extra_args; tensor_parallel says it all.",
    ),
    _sign(
        "RankStalled", HINT, r"No available shared memory broadcast block found in (\d{1,5}) seconds",
        "A rank has not answered the others for {0} s: it compiles, it quantizes, or it hangs.",
        "Wait where compilers run (a first start takes up to half an hour); a GPU at 96 % and below 30 W hangs: unload and load again.",
    ),
    _sign(
        "RpcTimedOut", CAUSE, r"RPC call to (\w{1,40}) timed out",
        "A rank did not finish {0} in time.",
        "Look for the rank that hangs; where it compiled, load again, or raise VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS in env.",
    ),
    # Flags and formats.
    _sign(
        "ServeTwice", ROOT, r"unrecognized arguments: serve\b",
        "`vllm serve` was given to something that is it already.", "Take `vllm serve` out: extra_args are the flags alone.",
    ),
    _sign(
        "UnknownFlag", ROOT, rf"error: unrecognized arguments: (--{_WORD})",
        "This release of vLLM has no flag {0}.",
        "Take it out of extra_args, or of what stood after `--`; `sparkd recipes check --parser PYTHON` tries a recipe's flags.",
    ),
    _sign(
        "FlagRefused", ROOT,
        rf"error: argument (?:-\w{{1,3}}, ?|-\w{{1,3}}/)?(--{_WORD})[^:]{{0,200}}: (?:invalid|expected|ignored explicit|not allowed)",
        "vLLM does not take the value of {0}.",
        "Correct it in extra_args or after `--`: `vllm serve --help=all` lists its values.",
    ),
    _sign(
        "SettingsRefused", CAUSE, r"ValidationError: \d{1,4} validation errors? for (\w{1,64})",
        "vLLM's {0} does not take its settings.", "The lines below that one in its log say which: `sparkd logs MODEL`.",
    ),
    _sign(
        "BlockSizeRefused", ROOT, r"No common block size for (\d{1,6})",
        "No attention kernel of this vLLM has blocks of {0} tokens.",
        "Leave --block-size out of extra_args, or set a power of two that the backend has, such as 16 or 32.",
    ),
    _sign(
        "QuantizationMismatch", ROOT,
        rf"Quantization method specified in the model config \(({_WORD})\) does not match .{{0,100}}\(({_WORD})\)",
        "The checkpoint is {0} and `quantization` says {1}.",
        "Leave quantization out: vLLM reads the format from the checkpoint, except for ModelOpt's (nvidia/...), which need modelopt.",
    ),
    _sign(
        "QuantizationUnknown", ROOT, rf"Unknown quantization method:? ({_WORD})?",
        "This release of vLLM does not know that quantization.",
        "ModelOpt's checkpoints (nvidia/...) need quantization: modelopt; leave it out for compressed-tensors.",
    ),
    _sign(
        "WeightsDoNotMatch", ROOT,
        r"has no parameter '[\w.]{1,80}' for checkpoint weight|Following weights were not initialized from checkpoint",
        "Names or shapes of the checkpoint's weights are not those that vLLM expects of this format.",
        "Leave quantization out or take the one of the model's card, or use a vLLM that knows this checkpoint.",
    ),
    _sign(
        "KernelMissing", ROOT, r"Failed to find a kernel that can implement the (\w{1,16}) linear layer|No (\w{1,16}) MoE backend supports",
        "This vLLM has no kernel for that format on this device.",
        "Choose another format by quantize (on a CPU quantize: bf16 serves what compressed-tensors stored in NVFP4, MXFP4 or INT4), or "
        "another vLLM: on a Spark one built for CUDA 13 (sm_120 or sm_121).",
    ),
    _sign(
        "MoeBackendRefused", ROOT, rf"moe_backend='({_WORD})' is not supported for (\w{{1,16}}) MoE",
        "The MoE backend {0} does not do {1}.", "Leave --moe-backend out, or use marlin.",
    ),
    _sign(
        "Fp4KernelFailed", ROOT,
        r"Failed to run cutlass FP4 gemm on sm12\d|Failed to initialize cutlass TMA WS grouped gemm|FP4 gemm Runner",
        "A CUTLASS FP4 kernel does not run on the GB10.",
        "Use --moe-backend marlin (and --linear-backend marlin), or a newer vLLM built for CUDA 13.",
    ),
    _sign(
        "PtxasTooOld", ROOT, r"Value 'sm_12\d[af]?' is not defined for option 'gpu-name'",
        "The ptxas that Triton uses does not know the GB10.",
        "Set TRITON_PTXAS_PATH to the ptxas of CUDA 13 (/usr/local/cuda/bin/ptxas) in env.",
    ),
    _sign(
        "NoKernelImage", ROOT, r"no kernel image is available for execution on the device",
        "This build of vLLM or torch has no code for this GPU.", "Install a vLLM built for CUDA 13 with sm_120 or sm_121.",
    ),
    _sign(
        "ArchitectureUnknown", ROOT, r"does not recognize this architecture|Model architectures \[.{1,120}\] are not supported for now",
        "This vLLM, or its transformers, is older than the model.", "Use a newer vLLM by engine.runtime or the model's runtime.",
    ),
    _sign(
        "ContextTooLong", ROOT, r"User-specified max_model_len \((\d{1,12})\) is greater than the derived max_model_len",
        "max_model_len {0} is more than the model was made for.", "Lower max_model_len, or take a recipe's @yarn variant.",
    ),
    _sign(
        "RemoteCode", ROOT, r"contains custom code which must be executed",
        "The model brings its own Python code.", "Read that code, then set trust_remote_code: true.",
    ),
    _sign(
        "CodeUntrusted", ROOT, rf"Code of (\S{{1,200}}) {trusted_code.REFUSED}",
        "The model names code of {0}, which is not trusted.",
        "Read that code, then add --code-revision with the commit of {0} to extra_args.",
    ),
    # Downloads and files.
    _sign(
        "Gated", ROOT, r"gated repo|is restricted and you are not in the authorized list|401 Client Error",
        "The hub requires a login for this model: it is gated or private.",
        "Accept its licence on its page, and give HF_TOKEN to the daemon's environment or log in with `hf auth login`.",
    ),
    _sign(
        "Offline", ROOT, r"LocalEntryNotFoundError|outgoing traffic has been disabled|couldn't connect to 'https://huggingface",
        "The model is not whole on this node, and the hub cannot be reached or HF_HUB_OFFLINE is set.",
        "Fetch it on every node; where its cache has no refs/main, name the commit by `revision`.",
    ),
    _sign(
        "NoWeights", ROOT, r"Cannot find any model weights with|is not a local folder and is not a valid model identifier|Invalid "
        r"repository ID or local directory",
        "That repository or folder holds no weights.",
        "Check `model`: a folder begins with '/', './' or '~', a hub id is owner/name.",
    ),
    _sign(
        "DiskFull", ROOT, r"No space left on device|Not enough free disk space",
        "The disk is full.", "Free some room: `sparkd ls --cached`, `sparkd rm --cached MODEL`, and old models of the hub's cache.",
    ),
    _sign(
        "NotReadable", CAUSE, r"PermissionError: \[Errno 13\]",
        "A file belongs to another user, often root after a download in a container.", "`sparkd doctor` names it and gives the command.",
    ),
    _sign(
        "DockerRefused", ROOT, r"permission denied .{0,80}docker\.sock",
        "This user may not use Docker.", "`sudo usermod -aG docker $USER`, then log in again.",
    ),
    _sign(
        "NoVllm", ROOT, r"No module named '?vllm'?\b",
        "The Python of this engine has no vLLM.", "Install vLLM there, or name another Python by engine.runtime.",
    ),
    _sign(
        "PackageMissing", ROOT, rf"({_WORD}) requires the ({_WORD}) library but it was not found",
        "{0} of this model needs the Python package {1}, which the Python of this engine does not have.",
        "Install it there, built for the same torch. The set-up of the CPU engine leaves torchvision out, whose default build is for CUDA.",
    ),
    _sign(
        "PortTaken", CAUSE, r"Address already in use|EADDRINUSE",
        "A port that the engine needs is taken, often by the remains of an earlier one.", "It is tried again with another port.",
    ),
    # Driver and device.
    _sign(
        "ProprietaryDriver", ROOT, r"RmInitAdapter failed",
        "The GPU's driver did not come up: on a GB10 only the open kernel module works.",
        "Install nvidia-open of the same release, then restart.",
    ),
    _sign(
        "DriverDeadlock", ROOT, r"task (?:nvidia-smi|NvmlTask|gpu-feature)\S{0,32} .{0,16}blocked|semaphore likely owned by task VLLM",
        "The GPU's driver holds a lock that an engine does not give back; nothing that asks the driver ends any more.",
        "Restart the machine: `sudo systemctl reboot --force --force` where an ordinary restart hangs.",
    ),
    _sign(
        "NoGpu", ROOT, r"couldn't communicate with the NVIDIA driver|No CUDA GPUs are available|Failed to infer device type|CUDA driver "
        r"version is insufficient",
        "The engine sees no GPU, or a driver older than its CUDA.",
        "Check `nvidia-smi`; in a container give it --gpus all, under systemd see DeviceAllow= in deploy/README.md.",
    ),
    _sign(
        "GpuFault", ROOT, r"an illegal memory access was encountered|unspecified launch failure|CUDA error: device-side assert|NVRM: Xid",
        "A kernel on the GPU failed.",
        "If it fails again, try --attention-backend, --moe-backend marlin or enforce_eager: true, and clear ~/.cache/vllm and ~/.triton.",
    ),
    # Serving.
    _sign(
        "ToolParserMissing", HINT, r"\"auto\" tool choice requires",
        "A client asks for tools and the engine was started without a parser for them.",
        "Set tool_call_parser to the model's own (docs/recipes.md).",
    ),
)  # fmt: skip
_ANY = re.compile("|".join(re.sub(r"(?<!\\)\((?!\?)", "(?:", signature.pattern.pattern) for signature in SIGNATURES))
