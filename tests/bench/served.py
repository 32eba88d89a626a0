"""Each format of a dense and a MoE model, served by a real daemon: loaded, answered, and how far its answers are from BF16. It prints.

    python -m tests.bench.served [--model dense,moe] [--quantize nvfp4,fp8,..] [--once] [--keep FILE]

One daemon with its own Ray, one model at a time, eager. Columns: seconds until READY, first and with the quantized weights on disk; the
mean difference of the log-probabilities of a prompt's tokens from those of BF16, over the five tokens that BF16 finds most likely; GiB of
the weights, and of the peak above them; GB/s of the load; GiB and tokens of the KV cache. Two models also take turns at the
end, with CUDA graphs: the daemon is killed and adopts its engine, a chat to the other model swaps, and a chat to the first swaps back. The
checkpoints are random (tests/support/architectures.py); those of a GPU are larger. --keep: writes what the admin API says of each model, as
JSON. Exit status 1: a format did not answer.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.arguments import Parser, formats, new
from tests.support.architectures import PRESETS, llama, write_qwen3_moe
from tests.support.checkpoints import GIB, write_checkpoint
from tests.support.daemon_process import DaemonProcess
from tests.support.daemon_process import daemon as daemon_of
from tests.support.pair_vllm import Said, prompt_log_probabilities, with_chat_template
from workers.host.runtime import API_SERVER

# Eight layers of Llama-3.1-8B with a small vocabulary.
LARGE_DENSE = {"num_hidden_layers": 8, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 1024, "head_dim": 128}
LARGE_DENSE |= {"num_attention_heads": 32, "num_key_value_heads": 8}
FORMATS = "fp8,fp8-block,mxfp4,nvfp4,nvfp4-a4,int4,nf4"
TOLD = 20  # tokens of each position
MOST_LIKELY = 5
HEAD = f"{'model':6} {'format':10} {'READY s':>8} {'again s':>8} {'apart':>8}"
HEAD += f" {'weights':>8} {'peak':>8} {'GB/s':>6} {'cache':>8} {'tokens':>10}"


def main() -> int:
    import torch

    on_gpu = torch.cuda.is_available()
    parser = Parser("tests.bench.served", __doc__, model="dense", quantize="int4")
    parser.add_argument("--model", default="dense,moe")
    parser.add_argument("--quantize", type=formats, default=FORMATS)
    parser.add_argument("--keep", type=new)
    parser.add_argument("--once", action="store_true", help="no second start from the quantized weights")
    asked = parser.parse_args()
    kinds, forms = asked.model.split(","), asked.quantize.split(",")
    failed: list[str] = []
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="sv") as name:
        folder = Path(name)
        entries = {kind: _entry(_checkpoint(folder / kind, kind, on_gpu=on_gpu), on_gpu=on_gpu) for kind in kinds}
        models = {f"{kind}-bf16": entry for kind, entry in entries.items()}
        models |= {f"{kind}-{form}": entries[kind] | {"quantize": form} for kind in kinds for form in forms}
        models |= {f"{kind}-graphs": entry | {"extra_args": []} for kind, entry in entries.items()}
        (folder / "d").mkdir()
        with daemon_of(folder / "d", {"models": models}) as daemon:
            daemon.ray_connected()
            print(HEAD, flush=True)
            for kind in kinds:
                stock = _row(daemon, kind, "bf16", None, kept, failed, once=asked.once)
                for form in forms:
                    _row(daemon, kind, form, stock, kept, failed, once=asked.once)
            if len(kinds) > 1:
                _turns(daemon, [f"{kind}-graphs" for kind in kinds], kept)
    if asked.keep:
        asked.keep.write_text(json.dumps(kept, indent=1))
    print(f"did not answer: {', '.join(failed)}" if failed else "every format answered")
    return int(bool(failed))


def _checkpoint(folder: Path, kind: str, *, on_gpu: bool) -> Path:
    device = "cuda" if on_gpu else "cpu"
    if kind == "moe":
        write_qwen3_moe(folder, device=device, **PRESETS["h200" if on_gpu else "smallest"])
    else:
        model = llama(**(LARGE_DENSE if on_gpu else {}))
        write_checkpoint(folder, model.config, model.entries, shard_bytes=2 * GIB, device=device)
    return with_chat_template(folder)


def _entry(folder: Path, *, on_gpu: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"model": str(folder), "entrypoint": API_SERVER, "max_model_len": 2048, "max_num_seqs": 64}
    if on_gpu:
        # FlashInfer would compile its sampler in the first start of a machine, for a minute and a half.
        return entry | {"memory_gib": 30, "extra_args": ["--enforce-eager"], "env": {"VLLM_USE_FLASHINFER_SAMPLER": "0"}}
    return entry | {"memory_gib": 3, "extra_args": ["--enforce-eager"], "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}


def _row(
    daemon: DaemonProcess, kind: str, form: str, stock: Said | None, kept: dict[str, Any], failed: list[str], *, once: bool
) -> Said | None:
    """Load it, ask it, load it again. Returns what it says; None where it did not start."""
    name = f"{kind}-{form}"
    try:
        first_s = _ready(daemon, name)
        kept[name] = daemon.model(name)
        said = _said(daemon, name)
        _stop(daemon, name)
        again_s = math.nan
        if not once:
            again_s = _ready(daemon, name)
            kept[f"{name} again"] = daemon.model(name)
            _stop(daemon, name)
    except (AssertionError, RuntimeError, KeyError) as error:
        failed.append(name)
        print(f"{kind:6} {form:10} {str(error)[:300]}", flush=True)
        return None
    apart = _apart(stock, said) if stock is not None else 0.0
    print(f"{kind:6} {form:10} {first_s:8.1f} {again_s:8.1f} {apart:8.4f} {_load_of(kept[name])}", flush=True)
    return said


def _ready(daemon: DaemonProcess, name: str) -> float:
    began_s = time.monotonic()
    daemon.load(name)
    while (model := daemon.model(name)).get("state") != "READY":
        if model.get("state") == "FAILED":
            raise RuntimeError(str(model.get("message")))
        time.sleep(0.2)
    return time.monotonic() - began_s


def _stop(daemon: DaemonProcess, name: str) -> None:
    daemon.unload(name)
    daemon.wait_for(name, "STOPPED")


def _said(daemon: DaemonProcess, name: str) -> Said:
    chat = daemon.chat(name, "hello")
    if chat.status_code != 200:
        raise RuntimeError(f"{chat.status_code}: {chat.text[:300]}")
    return prompt_log_probabilities(daemon, name, TOLD)


def _apart(stock: Said, said: Said) -> float:
    """The mean difference over the most likely tokens of `stock` that the other tells of too."""
    differences = [
        abs(here[token] - there[token])
        for here, there in zip(stock, said, strict=True)
        for token in sorted(here, key=lambda token: -here[token])[:MOST_LIKELY]
        if token in there
    ]
    return sum(differences) / len(differences)


def _load_of(model: dict[str, Any]) -> str:
    progress, cache = model["progress"], model["progress"]["kv"]
    rate = (progress.get("bytes_per_s") or 0) / 1e9
    sizes = [(cache.get(f"{name}_bytes") or 0) / GIB for name in ("weights", "load_peak", "pool")]
    return "{:8.2f} {:8.2f} {:6.2f} {:8.2f} {:10}".format(*sizes[:2], rate, sizes[2], cache.get("tokens") or 0)


def _turns(daemon: DaemonProcess, names: list[str], kept: dict[str, Any]) -> None:
    first, *others = names
    print(f"{first}, CUDA graphs: READY after {_ready(daemon, first):.1f} s", flush=True)
    kept[first] = daemon.model(first)
    before = daemon.pids_of(first)
    daemon.kill()
    began_s = time.monotonic()
    daemon.start()
    daemon.settled()
    daemon.wait_for(first, "READY")
    same = daemon.pids_of(first) == before
    print(
        f"daemon killed and started: READY after {time.monotonic() - began_s:.1f} s, {'adopted' if same else 'STARTED AGAIN'}", flush=True
    )
    for name in (*others, first):
        began_s = time.monotonic()
        answer = daemon.chat(name, "hello")
        print(f"a chat to {name}: {answer.status_code} after {time.monotonic() - began_s:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
